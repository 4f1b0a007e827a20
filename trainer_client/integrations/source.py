"""Source of a trainer's batches: what adapters take that open a session on a run for a trainer of their own."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from buffer_wire.errors import InvalidField
from trainer_client.client.blocking import BufferClient
from trainer_client.policy import Policy
from trainer_client.publish.publication import WeightPublisher
from trainer_client.session.plan import SessionOptions
from trainer_client.session.session import TrainerSession
from trainer_client.tasks import Task

__all__ = ["BufferSource"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSource:
    """Source of a trainer's batches: a run of the buffer and what feeds it."""

    client: BufferClient
    run_id: str
    publisher: WeightPublisher | None
    """Publisher that puts the saved weights in place for the engines; None: the trainer's own files are read."""
    tasks: Iterable[Task] | None = None
    """Tasks of the run, of as many samples as the trainer's config says; None: another process feeds."""
    policy: Policy = field(default_factory=Policy)
    """Policy of the run. batch_groups and batches_per_publish are filled in from the trainer's config."""
    options: SessionOptions = field(default_factory=SessionOptions)

    def session(
        self, *, batch_groups: int, next_step: int, trainer: str, batches_per_publish: int = 1
    ) -> AbstractContextManager[TrainerSession]:
        """Take the run over at `next_step`: `batch_groups` groups a step, a publish after each or after several, no
        group twice.

        Raises InvalidField for a policy that says otherwise than the config of `trainer`, and what opening a session
        raises.
        """
        fixed = {
            "batch_groups": batch_groups,
            "batch_tokens": 0,
            "batches_per_publish": batches_per_publish,
            "max_uses": 1,
        }
        for name, value in fixed.items():
            if getattr(self.policy, name) not in (None, value):
                limit = f"None or {value}, which follows from {trainer}'s config"
                raise InvalidField(f"policy.{name}", getattr(self.policy, name), limit)
        return self.client.session(
            self.run_id,
            policy=replace(self.policy, batch_groups=batch_groups, batches_per_publish=batches_per_publish),
            tasks=self.tasks,
            publisher=self.publisher,
            next_step=next_step,
            options=self.options,
        )
