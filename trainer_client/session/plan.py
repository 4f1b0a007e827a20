"""Plan of a session: its arguments and options."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from trainer_client.client.requests import ResumeMode
from trainer_client.field_names import NamedFields
from trainer_client.policy import Policy
from trainer_client.publish.publication import WeightPublisher
from trainer_client.session.metrics import OnStep
from trainer_client.state import Resumed
from trainer_client.tasks import Task
from trainer_client.waiting import OnWait

BatchGroups: TypeAlias = int | Callable[[int], int | None] | None
"""Number of groups N of a step: a number, a function of the step, or None for the policy's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions(NamedFields):
    """Options of a session that seldom change."""

    mode: ResumeMode = "replay"
    """Treatment of batches at or after next_step by a resume."""
    allow_regenerate: bool = False
    """Let a resume go back into freed replay data; those steps are assembled anew."""
    pull_timeout_s: float = 3600.0
    """Longest wait, in seconds, for one batch, or for one micro-batch of it."""
    max_pending_tasks: int | None = None
    """Number of pending tasks at which the feeder waits; None: four batches, at least 256, at most the policy's cap."""
    chunk_tasks: int = 64
    """Largest number of tasks drawn and submitted at once."""
    max_prefetch_bytes: int = 8 << 30
    """Limit on bytes of batches held ahead of the training loop."""
    on_wait: OnWait | None = None
    """Callback for every wait of the trainer while it pulls or publishes; an error that it raises ends the wait."""
    progress: bool = False
    """Show such waits in a line on the terminal, if standard error is one."""
    filter: str | None = None
    """Function `module:function` that is asked which groups of a step are kept; others take the place of those that are
    not. It gets a list of `GroupFacts`, and returns as many truth values. It runs in a process of its own."""
    sampler: str | None = None
    """Function like it that chooses among the groups of a whole step, after the filter; nothing takes the place of the
    rest."""
    selection_timeout_s: float = 60.0
    """Longest time, in seconds, for one answer of such a function."""
    barrier: Callable[[], object] | None = None
    """Function that returns when all ranks have called it, such as torch.distributed.barrier. A filter or a sampler
    needs it with several ranks."""
    on_step: OnStep | None = None
    """Callback with each step's number and metrics when the step is over; see `trainer_client.session.metrics`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlan:
    """Arguments of `BufferClient.session`."""

    run_id: str
    policy: Policy | None = None
    tasks: Iterable[Task] | None = None
    publisher: WeightPublisher | None = None
    next_step: int | None = None
    rank: int = 0
    world_size: int = 1
    prefetch: int = 0
    batch_groups: BatchGroups = None
    start: Resumed | None = None
    options: SessionOptions = field(default_factory=SessionOptions)
