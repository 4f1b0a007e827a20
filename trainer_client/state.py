"""What the service says about a run, as plain values.

Invariant: nothing here refers to a message; everything can be pickled and sent to other ranks.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainer_client.policy import Policy

if TYPE_CHECKING:
    from buffer_wire.estimate import Estimate


@dataclass(frozen=True, slots=True, order=True)
class WeightVersion:
    """Identity of a set of weights; ordered by epoch, then version."""

    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class Amount:
    """Sizes of a set of groups."""

    groups: int
    samples: int
    tokens: int
    bytes: int


@dataclass(frozen=True, slots=True)
class GroupLedger:
    """Every accepted group is in exactly one entry below `accepted`: accepted = their sum, always."""

    accepted: Amount
    queued: Amount
    forming: Amount
    delivered: Amount
    trained: Amount
    dropped_overflow: Amount
    dropped_stale: Amount
    recycled: Amount
    filtered: Amount
    discarded: Amount
    lost: Amount
    balanced: bool


@dataclass(frozen=True, slots=True)
class TaskLedger:
    """Every submitted task is in exactly one entry below `submitted`."""

    submitted: int
    pending: int
    leased: int
    completed: int
    failed: int
    cancelled: int
    balanced: bool


@dataclass(frozen=True, slots=True)
class Ledger:
    """The ledgers of a run."""

    groups: GroupLedger
    tasks: TaskLedger
    environments: dict[str, GroupLedger] = field(default_factory=dict)
    """What became of each environment's groups, by its name; "" for groups that named none."""

    @property
    def balanced(self) -> bool:
        """True when all of them add up."""
        return self.tasks.balanced and all(part.balanced for part in (self.groups, *self.environments.values()))


@dataclass(frozen=True, slots=True)
class Engine:
    """What a worker last said of one of its engines. `state`: starting, ready, loading, quarantined, stopped."""

    engine_id: str
    worker_id: str
    state: str
    loaded: WeightVersion
    reloads: int
    last_reload_ms: int
    last_error: str
    errors: int
    membership: int = 0
    """The process group that it belongs to; 0: none."""
    prepared: WeightVersion | None = None
    """The planned version for which it is paused and ready to receive."""
    weights_url: str = ""
    """Where its worker serves the versions it has fetched to other workers; empty: nowhere."""
    silent_ms: int = 0
    """Time since its worker's last report."""
    decoded_tokens: int = 0
    """Tokens that it has sent since its worker began with it."""
    decode_busy_ms: int = 0
    """Time in which at least one request decoded."""
    decode_request_ms: int = 0
    """Time of each request that decodes, from its first token to its last, summed."""


@dataclass(frozen=True, slots=True)
class TaskFailure:
    """A task that failed for good, with its last error."""

    task_id: str
    attempts: int
    error: str
    time_ms: int


@dataclass(frozen=True, slots=True)
class RunState:
    """The whole state of a run. Steps below `next_step` are assembled, below `committed_steps` trained, below
    `checkpointed_steps` freed.
    """

    run_id: str
    policy: Policy
    """The effective policy, every field that has a value filled in."""
    revision: int
    created_ms: int
    epoch: int
    published: WeightVersion
    next_step: int
    committed_steps: int
    checkpointed_steps: int
    world_size: int
    """0 until the epoch's first pull."""
    cursor: int
    paused: str
    """Empty, or why the run is paused: store_rolled_back, operator, failure_budget_exceeded."""
    draining: bool
    """True after a drain: there will be no more tasks and leases."""
    ledger: Ledger
    statistics: dict[str, int]
    """Counters by the names of the wire's RunStatistics."""
    engines: tuple[Engine, ...]
    failures: tuple[TaskFailure, ...]
    """The newest first."""
    estimate: "Estimate | None" = None
    """Its staleness: predicted, measured, explained; None from a service that does not estimate."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """Result of a submit: the cursor after it, ids in request order, tasks pending now."""

    cursor: int
    task_ids: tuple[str, ...]
    pending_tasks: int


@dataclass(frozen=True, slots=True)
class TrainerTime:
    """What a trainer did since its epoch began, by its own clock."""

    busy_ms: int
    """Everything but waiting for batches."""
    wait_ms: int
    """Waiting for batches."""


@dataclass(frozen=True, slots=True)
class Published:
    """Result of a publish."""

    version: WeightVersion
    committed_steps: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """Result of a resume: where the trainer and its feeder go on. Broadcast it to the other ranks."""

    epoch: int
    """The trainer's from now on; every older one is refused."""
    next_step: int
    """The first step to pull."""
    next_unassembled_step: int
    """Steps from next_step up to this one are exact replays."""
    version: int
    """Of the weights that belong to next_step."""
    cursor: int
    feeder_state: bytes
