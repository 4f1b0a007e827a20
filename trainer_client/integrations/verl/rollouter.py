"""Rollouter, message queue and receiving end of the weights, in one actor of Ray that holds the run.

Invariants: one fetch of verl's trainer is one step of the run. A synchronization of parameters is a publish, of the
steps before it and of no others. verl's version counts synchronizations. A checkpoint says how many steps are in it, in
a file of its own; it counts when verl's tracker file names it.
"""
# ruff: noqa: ANN401 - verl and Ray name the arguments of what they call; mypy does not see their types

import json
import shutil
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import ray
from verl.experimental.fully_async_policy.detach_utils import RolloutSample
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

from buffer_wire.errors import InvalidField
from trainer_client.batch import REWARDS
from trainer_client.integrations.source import BufferSource
from trainer_client.integrations.verl.rows import Rows
from trainer_client.integrations.verl.steps import step_groups, versions
from trainer_client.integrations.verl.weights import BACKEND
from trainer_client.session.session import TrainerSession

if TYPE_CHECKING:
    from trainer_client.batch import Group

MakeSource: TypeAlias = Callable[[Any], BufferSource]
"""Function of verl's config that makes the source. Ray carries it to the process that holds the run."""
PROGRESS = "rollout_buffer.json"
"""File in verl's checkpoint: {"next_step": steps of the run that are in its weights}."""


class BufferRollouter:
    """Rollouter, message queue and receiving end of the weights: the methods that verl's trainer calls of the three.

    A process uses it as an actor of Ray, one call after another. `config`: verl's whole; `source`: makes the source.
    """

    def __init__(self, config: Any, source: MakeSource, pad_token_id: int) -> None:
        self.session: TrainerSession | None = None
        """Session that holds the run, from `open` to `close`."""
        self._config, self._source = config, source(config)
        self._step_groups = step_groups(config)
        self._total_steps = versions(config) * config.async_training.trigger_parameter_sync_step
        self._rows = Rows.of(config, pad_token_id)
        self._folder = Path(config.trainer.default_local_dir).absolute()
        self._stack = ExitStack()
        self._groups: deque[Group] = deque()
        self._queued = 0
        self._version = self._ahead = 0
        self._saved: Path | None = None
        """Checkpoint that verl's tracker file may not name yet."""

    # ── the run ──────────────────────────────────────────────────────────────

    def open(self, version: int) -> None:
        """Take the run over where the weights of verl's `version` are, from its checkpoint; 0: at the start.

        Raises InvalidField for a checkpoint that does not say how many steps are in it, and a session's errors.
        """
        source = self._source
        if source.publisher is None:
            raise InvalidField("publisher", None, "one of directories: what the actor saves does not stay")
        if others := set(source.policy.stages) - {REWARDS}:
            limit = f"none but {REWARDS!r}: verl computes values and log-probabilities itself"
            raise InvalidField("policy.stages", sorted(others), limit)
        session = source.session(
            batch_groups=self._step_groups,
            batches_per_publish=int(self._config.async_training.trigger_parameter_sync_step),
            next_step=self._next_step(version) if version else 0,
            trainer="verl",
        )
        self._stack.enter_context(source.client)
        if callable(close := getattr(source.publisher, "close", None)):
            self._stack.callback(close)
        self.session = self._stack.enter_context(session)
        self._version, self._ahead = version, version - self.session.start.version

    def close(self) -> None:
        """Let go of the run, which goes on."""
        if self.session is not None:
            self._confirm()
        self.session = None
        self._stack.close()

    def _next_step(self, version: int) -> int:
        named = self._config.trainer.resume_from_path if self._config.trainer.resume_mode == "resume_path" else None
        file = Path(named or self._folder / f"global_step_{version}") / PROGRESS
        try:
            return int(json.loads(file.read_text())["next_step"])
        except FileNotFoundError:
            limit = f"one with {PROGRESS}: this one does not say how many steps of a run are in it"
            raise InvalidField("trainer.resume_mode", str(file.parent), limit) from None

    # ── message queue ────────────────────────────────────────────────────────

    def get_sample(self) -> tuple[bytes | None, int]:
        """Take the next group, as a pickled RolloutSample, and the number of those behind it; None at the end.

        Waits for the workers as long as a session's pull. Raises InvalidField for groups that verl would not train on
        as they are, and a session's errors.
        """
        self._confirm()
        if not self._groups and not self._pull():
            return None, 0
        group = self._groups.popleft()
        sample = RolloutSample(
            full_batch=self._rows.of_group(group, self._ahead), sample_id=group.group_id, epoch=0, rollout_status={}
        )
        return ray.cloudpickle.dumps(sample), self.get_queue_size()

    def get_queue_size(self) -> int:
        """Return the number of groups that were queued, at the last pull, or pulled and not taken."""
        return self._queued + len(self._groups)

    def _pull(self) -> bool:
        """Pull the next step; False when all are trained on."""
        session = self._held()
        batch = next(session, None) if session.next_step < self._total_steps else None
        if batch is None:
            return False
        if len(batch.groups) != self._step_groups:
            limit = f"{self._step_groups}: FullyAsyncTrainer trains on no less"
            raise InvalidField(f"groups of step {batch.step}", len(batch.groups), limit)
        self._groups.extend(batch.groups)
        self._queued = batch.info.queued_groups
        return True

    # ── rollouter ────────────────────────────────────────────────────────────

    def get_replicas(self) -> "list[_Replica]":
        """Return the one replica that weights are sent to: this actor."""
        return [_Replica((ray.get_runtime_context().current_actor,))]

    def get_total_produced_samples(self) -> int:
        """Return the number of groups taken so far."""
        return self._held().next_step * self._step_groups - len(self._groups)

    def get_completed_steps(self) -> int:
        """Return the number of steps taken so far."""
        return self._held().next_step

    def reset_staleness(self) -> dict[str, float]:
        """Return the metrics of the newest step, which verl logs, by the names that a session gives them."""
        return self._held().metrics()

    def save_checkpoint(self, folder: str) -> None:
        """Write how many steps are in verl's checkpoint, whose other parts are there already."""
        session = self._held()
        session.commit()
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._saved = Path(folder)
        (self._saved / PROGRESS).write_text(json.dumps({"next_step": session.next_step}))

    def _confirm(self) -> None:
        """Tell the service of a checkpoint that a recovery would find: those steps are not replayed any more."""
        if self._saved is None:
            return
        found = find_latest_ckpt_path(str(self._folder))
        if found is not None and Path(found) == self._saved.absolute():
            self._held().checkpoint()
        self._saved = None

    # ── weights ──────────────────────────────────────────────────────────────

    def execute_checkpoint_engine(self, method: str, **_: Any) -> Any:
        """Take part in a synchronization: say where the weights go ("prepare"), publish them ("finalize")."""
        if method == "prepare":
            return {"directory": str(self._folder / BACKEND)}
        if method == "finalize":
            self._publish()
        return None

    def update_weights(self, global_steps: int) -> None:
        """Take the number of the version that the actor saves meanwhile."""
        self._version = global_steps

    def _publish(self) -> None:
        session = self._held()
        saved = self._folder / BACKEND / f"global_step_{self._version}"
        if not saved.is_dir():
            limit = "a directory that the actor's rank 0 and this process both see"
            raise InvalidField("trainer.default_local_dir", str(saved), limit)
        session.publish(saved)
        shutil.rmtree(saved)

    def _held(self) -> TrainerSession:
        if self.session is None:
            raise InvalidField("rollouter", "asked", "open only")
        return self.session


@dataclass(frozen=True, slots=True)
class _Replica:
    """Replica as verl's CheckpointEngineManager sees one; workers pause their engines themselves."""

    workers: tuple[Any, ...]

    async def abort_all_requests(self, **_: Any) -> None:
        """Do nothing, as every other method: each worker pauses its engine for the load."""

    async def resume_generation(self) -> None: ...

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...
