"""Progress of a run along a transformers training loop: taken over, published to and checkpointed with it.

Invariants: weights are published after optimizer steps that end a step of the run, never inside one. A checkpoint says
how many steps of the run are wholly in its weights, and training goes on from there. The number is in
trainer_state.json, as the state of this callback. Replay data is freed only when the checkpoint that covers it is on
disk.

Followed: transformers 5.23, `TrainerCallback` and `ExportableState`. Needs transformers.
"""
# ruff: noqa: ARG002 - transformers names the arguments of callbacks

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, cast

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from buffer_wire.errors import InvalidField
from trainer_client.batch import Batch
from trainer_client.publish.publication import WeightSource
from trainer_client.session.metrics import GRACE_S
from trainer_client.session.session import TrainerSession

logger = logging.getLogger("trainer_client")


class RolloutBufferCallback(TrainerCallback, ExportableState):
    """Callback that holds the run from `on_train_begin` to `close`.

    `open_session` gives a session of the run from a step on. `weights` gives the source for the session's publisher.
    `optimizer_steps`: the number in which a step of the run is trained; 1 where an optimizer step takes several.
    """

    def __init__(
        self,
        open_session: Callable[[int], AbstractContextManager[TrainerSession]],
        weights: Callable[[], WeightSource],
        optimizer_steps: int,
    ) -> None:
        self.session: TrainerSession | None = None
        self._open_session = open_session
        self._weights = weights
        self._optimizer_steps = optimizer_steps
        self._stack = ExitStack()
        self._steps_since_pull = 0
        """Number of optimizer steps since the last pull; after `optimizer_steps` of them the pulled step is trained."""
        self._pulled = False
        self._published_steps = 0

    def pull(self) -> Batch:
        """Pull the next step of the run. Raises InvalidField outside of `train` and when the run is drained."""
        session = self._held()
        batch = next(session, None)
        if batch is None:
            limit = "one that goes on, or a max_steps that fits what it still has"
            raise InvalidField(f"state of run {session.run_id}", "drained", limit)
        self._steps_since_pull, self._pulled = 0, True
        return batch

    def close(self) -> None:
        """Let go of the run, which goes on."""
        self.session = None
        self._stack.close()

    def state(self) -> dict[str, dict[str, int]]:
        """Return the state for the checkpoint: {"next_step": steps of the run that are wholly in the weights}."""
        steps = 0 if self.session is None else self.session.next_step - (0 if self._whole else 1)
        return {"args": {}, "attributes": {"next_step": steps}}

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the newest step, by the names under which they are logged; see
        `trainer_client.session.metrics`.
        """
        return {} if self.session is None else self.session.metrics(timeout_s=GRACE_S)

    # ── what transformers calls ──────────────────────────────────────────────

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Take the run over at the step of the weights. Raises InvalidField for a checkpoint without that step."""
        saved = cast("dict[str, Any]", state.stateful_callbacks or {}).get(type(self).__name__)
        if state.global_step and not saved:
            limit = "one that a BufferGRPOTrainer saved: this one does not say how many steps of a run are in it"
            raise InvalidField("resume_from_checkpoint", f"checkpoint-{state.global_step}", limit)
        next_step = int(saved["attributes"]["next_step"]) if state.global_step and saved else 0
        self._pulled, self._published_steps = False, next_step
        self.session = self._stack.enter_context(self._open_session(next_step))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Publish after the last optimizer step of a step of the run, as often as the policy says."""
        session = self._held()
        self._steps_since_pull += 1
        trained = session.next_step - self._published_steps
        if self._whole and trained >= (session.policy.batches_per_publish or 1):
            session.publish(self._weights())
            self._published_steps = session.next_step

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Tell the service of the checkpoint, which is on disk: the steps it covers are not replayed any more."""
        session = self._held()
        if self._whole:
            session.checkpoint()
            return
        step = session.next_step - 1
        logger.warning(
            "checkpoint-%d lies inside step %d of run %s: a resume trains on that step from its start",
            state.global_step,
            step,
            session.run_id,
        )

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Commit steps that are trained and not published."""
        if self.session is not None and self._whole:
            self.session.commit()

    # ── inside ───────────────────────────────────────────────────────────────

    @property
    def _whole(self) -> bool:
        """True when everything that was pulled is in the weights."""
        return not self._pulled or self._steps_since_pull >= self._optimizer_steps

    def _held(self) -> TrainerSession:
        if self.session is None:
            limit = "only inside of train(): evaluate with TrainerSession.evaluate, beside the training"
            raise InvalidField("rollouts", "asked for", limit)
        return self.session
