"""AReaL's PPOTrainer, with a run of the buffer in the place of its rollout controller.

    source = BufferSource(client=client, run_id="math", publisher=publisher, tasks=tasks)
    with BufferPPOTrainer(config, train_dataset, buffer=source) as trainer:
        trainer.train()

Invariants: one global step of AReaL is one step of the run. AReaL's version counts the steps in the weights, so it is
the next step to pull. A trainer that recovers states its version before it asks for the first batch, and the run is
taken over there. Weights go through AReaL's own disk update: the actor saves, announces the directory, and waits until
it is published; that commits the steps in it.

Followed: areal 1.0.4, single controller: `RolloutController`, `RolloutCallback`, `PPOTrainer._init_rollout` and
`_save_recover_checkpoint`.
"""
# ruff: noqa: ANN401, SLF001 - AReaL names the arguments of what is overridden; mypy does not see its types

import asyncio
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buffer_wire.errors import InvalidField
from trainer_client.batch import Batch, Group
from trainer_client.collate import collate
from trainer_client.integrations.source import BufferSource
from trainer_client.session.session import TrainerSession

try:
    from areal.api import InferenceEngine, RolloutWorkflow
    from areal.infra import RolloutController
    from areal.trainer import PPOTrainer
    from areal.utils import name_resolve, names
    from areal.utils.environ import is_single_controller
except ImportError as error:
    raise ImportError(
        "trainer_client.integrations.areal needs AReaL: pip install 'rollout-buffer[torch]' areal==1.0.4"
    ) from error

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BufferController", "BufferPPOTrainer", "BufferSource"]


class BufferController(RolloutController):
    """Rollout controller without engines: batches come from a run, and weights are published to it.

    `config`: the trainer's `InferenceEngineConfig`. Batches raise InvalidField for what a run cannot give, and a
    session's errors.
    """

    def __init__(self, source: BufferSource, config: Any, scheduler: Any) -> None:
        super().__init__(InferenceEngine, config, scheduler)
        self.session: TrainerSession | None = None
        """Session that holds the run, from the first batch to `destroy`."""
        self._source = source
        self._stack = ExitStack()
        self._ahead = 0
        """Difference between AReaL's versions and the run's."""

    def initialize(self, role: str, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002 - there are no servers to start
        """Listen for the actor's weight updates, once."""
        if self._callback_server is None:
            self._start_callback_server()

    def destroy(self) -> None:
        """Let go of the run, which goes on."""
        self.session = None
        self._stack.close()
        super().destroy()

    # ── batches ──────────────────────────────────────────────────────────────

    def prepare_batch(
        self,
        dataloader: Any,
        workflow: Any = None,  # noqa: ARG002 - workers run the workflow
        workflow_kwargs: Any = None,  # noqa: ARG002
        should_accept_fn: Any = None,
        group_size: int = 1,
        dynamic_bs: bool = False,  # noqa: FBT001, FBT002 - RolloutController's
    ) -> "list[dict[str, Tensor]]":
        """Pull the next step: a trajectory for each group, tensors [group_size, tokens] and rewards [group_size].

        Only the dataloader's batch_size is used. Raises InvalidField for a drained run, filters of AReaL, batches of
        other sizes, and groups of another size, with rows or with images.
        """
        if should_accept_fn is not None:
            raise InvalidField("dynamic_filter_fn", should_accept_fn, "None: SessionOptions(filter=…) or the policy")
        if dynamic_bs:
            raise InvalidField("dynamic_bs", dynamic_bs, "False: a step of the run has batch_groups groups")
        if self.session is None:
            self.session = self._open(dataloader.batch_size)
        batch = next(self.session, None)
        if batch is None:
            limit = "one that goes on, or a total_train_steps that fits what it still has"
            raise InvalidField(f"state of run {self.session.run_id}", "drained", limit)
        return [self._trajectory(batch, group, group_size) for group in batch.groups]

    def rollout_batch(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002 - RolloutController's
        """Raise InvalidField: nothing is generated on demand."""
        raise InvalidField("rollout_batch", "called", "prepare_batch: workers generate on their own")

    def _open(self, batch_groups: int) -> TrainerSession:
        session = self._stack.enter_context(
            self._source.session(batch_groups=batch_groups, next_step=self.get_version(), trainer="AReaL")
        )
        self._ahead = session.start.next_step - session.start.version
        return session

    def _trajectory(self, batch: Batch, group: Group, group_size: int) -> "dict[str, Tensor]":
        if len(group.samples) != group_size:
            limit = f"gconfig.n_samples, {group_size}"
            raise InvalidField(f"group_size of task {group.task_id}", len(group.samples), limit)
        group.refuse_rows("AReaL's normalization counts gconfig.n_samples rows a prompt")
        group.refuse_images("AReaL would train without them")
        padded = collate(batch, groups=[group])
        versions = padded.versions.int()
        return {
            "input_ids": padded.token_ids.int(),
            "attention_mask": padded.attention_mask,
            "loss_mask": padded.loss_mask.int(),
            "logprobs": padded.logprobs,
            "versions": versions.where(versions < 0, versions + self._ahead),
            "rewards": padded.rewards,
        }

    # ── weights ──────────────────────────────────────────────────────────────

    async def update_weights_from_disk(self, meta: Any) -> None:
        """Publish what the actor saves at `meta.path`, when it says that it is whole; then remove it.

        What is saved before the first batch is not published: engines start with those weights, and a run that is taken
        over at an earlier step offers that step's own.
        """
        await asyncio.to_thread(self._publish, Path(meta.path))

    async def init_weights_update_group(self, meta: Any) -> None:
        """Raise InvalidField: no engine here joins a group."""
        raise InvalidField("actor.weight_update_mode", meta.type, "disk: the buffer's engines fetch files")

    def _publish(self, directory: Path) -> None:
        saved = names.update_weights_from_disk(self.config.experiment_name, self.config.trial_name, self.get_version())
        name_resolve.wait(saved, timeout=self.config.request_timeout)
        if self.session is not None:
            self.session.publish(directory)
        if self._source.publisher is not None:
            shutil.rmtree(directory, ignore_errors=True)

    # ── what else a trainer calls ────────────────────────────────────────────

    def pause(self) -> None:
        """Do nothing: each worker pauses its engine for the load."""

    def resume(self) -> None:
        """Do nothing, as `pause`."""

    def export_stats(self) -> dict[str, float]:
        """Return the metrics of the newest step, by the names that a session gives them."""
        return {} if self.session is None else self.session.metrics()


class BufferPPOTrainer(PPOTrainer):
    """PPOTrainer on a run of the buffer; its config keeps its meaning but for `rollout`, whose engines do not start.

    Raises InvalidField for a config that the buffer does not serve.
    """

    def __init__(
        self, config: Any, train_dataset: Any = None, valid_dataset: Any = None, *, buffer: BufferSource
    ) -> None:
        wanted = {
            "AREAL_SPMD_MODE": (not is_single_controller(), False, "False: the single controller alone is served"),
            "actor.weight_update_mode": (config.actor.weight_update_mode, "disk", "disk: engines fetch files"),
            "actor._version": (config.actor._version, "v1", "v1"),
            "rollout._version": (config.rollout._version, "v1", "v1"),
            "actor.use_lora": (config.actor.use_lora, False, "False: adapters are not published here"),
            "valid_dataset": (valid_dataset, None, "None: evaluate with TrainerSession.evaluate, beside the training"),
        }
        for name, (value, served, limit) in wanted.items():
            if value != served:
                raise InvalidField(name, value, limit)
        self._source = buffer
        self._controller: BufferController | None = None
        super().__init__(config, train_dataset, valid_dataset)

    def train(self, **changes: Any) -> None:
        """Train; `changes` are PPOTrainer's, without workflows. Raises a session's errors besides AReaL's."""
        super().train(workflow=_InWorkers, **changes)

    def _init_rollout(self, rollout_config: Any, *args: Any, **kwargs: Any) -> BufferController:  # noqa: ARG002
        if self._controller is None:
            self._controller = BufferController(self._source, rollout_config, self.scheduler)
            self._controller.initialize("rollout")
        return self._controller

    def _save_recover_checkpoint(self, *, global_step: int, **place: int) -> None:
        """Save as AReaL does, and tell the service of it when it is on disk: those steps are not replayed any more."""
        super()._save_recover_checkpoint(global_step=global_step, **place)
        session = self.rollout.session
        if session is not None and self.recover_handler.last_step_info.global_step == global_step:
            session.checkpoint()


class _InWorkers(RolloutWorkflow):
    """Workflow that a trainer names where workers run it."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:  # noqa: ARG002 - RolloutWorkflow's
        raise InvalidField("arun_episode", "called", "the buffer's workers, which generate")
