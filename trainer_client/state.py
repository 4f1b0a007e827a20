"""State of a run, and results of calls, as plain values.

Invariant: nothing here refers to a message; everything can be pickled and sent to other ranks.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainer_client.policy import Policy

if TYPE_CHECKING:
    from buffer_wire.estimate import Estimate
    from trainer_client.batch import BatchInfo


@dataclass(frozen=True, slots=True, order=True)
class WeightVersion:
    """Weight version: the identity of a set of weights, ordered by term, then version."""

    term: int
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
    """Ledger of groups: every accepted group is in exactly one entry below `accepted`; accepted = their sum, always."""

    accepted: Amount
    queued: Amount
    forming: Amount
    delivered: Amount
    trained: Amount
    dropped_overflow: Amount
    dropped_stale: Amount
    recycled: Amount
    filtered: Amount
    rejected: Amount
    discarded: Amount
    lost: Amount
    balanced: bool


@dataclass(frozen=True, slots=True)
class TaskLedger:
    """Ledger of tasks: every submitted task is in exactly one entry below `submitted`."""

    submitted: int
    pending: int
    leased: int
    completed: int
    failed: int
    cancelled: int
    balanced: bool


@dataclass(frozen=True, slots=True)
class Ledger:
    """Ledgers of a run: groups, tasks, and groups by environment."""

    groups: GroupLedger
    tasks: TaskLedger
    environments: dict[str, GroupLedger] = field(default_factory=dict)
    """Ledger of groups of each environment, by its name; "" for groups that named none."""

    @property
    def balanced(self) -> bool:
        """True when all ledgers add up."""
        return self.tasks.balanced and all(part.balanced for part in (self.groups, *self.environments.values()))


@dataclass(frozen=True, slots=True)
class Engine:
    """Engine, as its worker last reported it. `state`: starting, ready, loading, quarantined, stopped."""

    engine_id: str
    worker_id: str
    state: str
    loaded: WeightVersion
    reloads: int
    last_reload_ms: int
    last_error: str
    errors: int
    membership: int = 0
    """Membership number of the engine's process group; 0: none."""
    prepared: WeightVersion | None = None
    """Weight version that the engine is paused for and ready to receive by a broadcast; None: none."""
    weights_url: str = ""
    """Base URL at which its worker serves the versions it has fetched to other workers; empty: it serves none."""
    weights_from: str = ""
    """Source of the files of the last version that its worker fetched for it, and why; empty: none were."""
    silent_ms: int = 0
    """Time since the last report of its worker."""
    decoded_tokens: int = 0
    """Tokens that the engine has sent since its worker began with it."""
    decode_busy_ms: int = 0
    """Time in which at least one request decoded."""
    decode_request_ms: int = 0
    """Decode time summed over requests, each from its first token to its last."""
    running_samples: int = 0
    """Samples of its worker that run on it."""
    max_running_samples: int = 0
    """Samples of the training that its worker lets run on it at once; 0: not known."""
    kv_usage_milli: int = 0
    """Part of its KV cache in use, in thousandths."""
    moved_samples: int = 0
    """Samples of its leases that another engine of its worker took over."""
    surplus_samples: int = 0
    """Samples beyond their group's size that were cut off when it was complete."""
    surplus_tokens: int = 0
    """Tokens of those samples."""
    takes_buckets: bool = False
    """True when it takes a broadcast's tensors in buckets."""


@dataclass(frozen=True, slots=True)
class TaskFailure:
    """Failure of a task: given up for good, with its last error."""

    task_id: str
    attempts: int
    error: str
    time_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessControl:
    """Last decision of the controller that holds `target_staleness_milli`, and the values that it has in effect."""

    outcome: str
    """Outcome: moved, settling, holding, open (fresher, with nothing lowered for it) or out_of_reach."""
    reason: str
    version: int
    """Published version after which it was made."""
    moved_at: int
    moves: int
    measured: float | None
    """Mean staleness by the target's measure, in versions; None: not measured yet."""
    max_lookahead: float | None
    """Versions, with a fraction; None: no bound."""
    micro_batch_groups: int
    max_queued_groups: int
    max_inflight_groups: int
    """Groups in flight; 0: no bound."""


@dataclass(frozen=True, slots=True)
class ReuseLedger:
    """Ledger of uses of groups beyond their own steps: drawn = delivered + trained + given_back + lost."""

    reusable_groups: int = 0
    """Trained groups that may be used again."""
    drawn: int = 0
    """Uses that were drawn for steps."""
    delivered: int = 0
    """Uses by steps that are not committed."""
    trained: int = 0
    given_back: int = 0
    """Uses that the trainer rejected, or that a resume took back."""
    lost: int = 0
    """Uses whose payloads were gone."""


@dataclass(frozen=True, slots=True)
class StageState:
    """State of a stage of the policy: who is behind, and how fast it is."""

    name: str
    waiting: int
    """Groups that wait for a worker of the stage."""
    leased: int
    """Groups that its workers hold."""
    added: int
    """Groups that it has added columns to so far."""
    failed: int
    """Leases of it that failed or expired so far."""
    busy_ms: int
    """Time from lease to columns, in ms, summed over the groups that it has added columns to."""
    asked_ms: int | None
    """Time since a worker of the stage asked for groups, in ms; None: none ever has."""
    passed_over: int
    """Groups that left the stage without its columns, since the policy named it no more."""
    added_bytes: int
    """Bytes of the columns that it has added so far; the groups that have them count with them."""


@dataclass(frozen=True, slots=True)
class EnvironmentWork:
    """Work on the tasks of one environment so far, without evaluations."""

    environment: str
    starts: int
    """Leases given."""
    failed_attempts: int
    """Leases that ended in an error, or expired."""
    failed_tasks: int
    """Tasks that failed for good."""
    failed_samples: int
    """Samples of accepted groups whose function named a failure."""
    limited_for_ms: int
    """Time until its starts_per_minute allow the next lease; 0: now."""


@dataclass(frozen=True, slots=True)
class RunState:
    """State of a whole run.

    Steps below `next_step` are assembled, below `committed_steps` trained, below `checkpointed_steps` freed.
    """

    run_id: str
    policy: Policy
    """Effective policy, with every field that has a value filled in."""
    revision: int
    created_ms: int
    term: int
    published: WeightVersion
    next_step: int
    committed_steps: int
    checkpointed_steps: int
    world_size: int
    """Number of the trainer's ranks; 0 until the term's first pull."""
    cursor: int
    paused: str
    """Reason why the run is paused: store_rolled_back, operator, failure_budget_exceeded; empty when it is not."""
    draining: bool
    """True after a drain: no more tasks are accepted and no more leases given."""
    ledger: Ledger
    statistics: dict[str, int]
    """Counters, by the names of the wire's RunStatistics."""
    engines: tuple[Engine, ...]
    failures: tuple[TaskFailure, ...]
    """Tasks that failed for good, the newest first."""
    estimate: "Estimate | None" = None
    """Estimate of the run's staleness: predicted, measured, explained. None from a service that does not estimate."""
    control: StalenessControl | None = None
    """Controller of a target of staleness; None where there is no target, or nothing was published since."""
    stages: tuple[StageState, ...] = ()
    """Stages of the policy in their order, then those that are named no more while groups are in them."""
    reuse: ReuseLedger = ReuseLedger()
    """Uses of groups beyond their own steps (policy max_uses)."""
    missing_groups: int = 0
    """Groups that complete steps, which are not committed, are still to get for rejected ones."""
    environment_work: tuple[EnvironmentWork, ...] = ()
    """Work on tasks by environment, in order of name."""
    blob_bytes: int = 0
    """Bytes of the run's blobs, as images of prompts."""
    max_blob_bytes: int = 0
    """Bytes that they may have together; 0 from an older service."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """Result of a submit: the cursor after it, ids in request order, tasks pending now."""

    cursor: int
    task_ids: tuple[str, ...]
    pending_tasks: int


@dataclass(frozen=True, slots=True)
class TrainerTime:
    """Time that a trainer spent since its term began, by its own clock."""

    busy_ms: int
    """Time spent on everything but waiting for batches, in ms."""
    wait_ms: int
    """Time spent waiting for batches, in ms."""


@dataclass(frozen=True, slots=True)
class Published:
    """Result of a publish: the published version and the steps committed so far."""

    version: WeightVersion
    committed_steps: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """Result of a rejection: the step as it is now."""

    rejected_groups: int
    """Groups that this call has rejected; a repeat rejects none."""
    missing_groups: int
    """Groups that the step is still to get, in the micro-batches after `info.micro_batch`."""
    info: "BatchInfo"
    """Info of the step: its totals, its last micro-batch, and whether that is final. A shard is not meant."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Result of a resume: the place where the trainer and its feeder go on. Broadcast it to the other ranks."""

    term: int
    """Term of the trainer from now on; every older one is refused."""
    next_step: int
    """First step to pull after the resume."""
    next_unassembled_step: int
    """Step up to which, from next_step, batches are exact replays."""
    version: int
    """Version of the weights that belong to next_step."""
    cursor: int
    feeder_state: bytes
