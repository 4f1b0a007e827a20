"""Requests and results of every operation on a run, as plain values.

They are what the RPC side hands to a store and what the reference model understands. Times are integer
milliseconds, versions and sizes integers, rewards milli-rewards. `weights` are (epoch, version) pairs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from buffer_service.domain.policy import RunPolicy
from buffer_service.domain.window import Window

Buffer: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, order=True)
class WeightVersion:
    """Identity of a set of weights."""

    epoch: int = 0
    version: int = 0


# ── tasks ────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class NewTask:
    """A task to submit. `spec` is the serialized wire Task, opaque here; an empty task_id asks for a generated one."""

    task_id: str
    group_size: int
    priority: int
    environment: str
    spec: bytes


@dataclass(frozen=True, slots=True)
class Submit:
    """Compare-and-set of the cursor together with tasks."""

    epoch: int
    request_id: str
    expected_cursor: int
    cursor: int
    feeder_state: bytes
    tasks: Sequence[NewTask]


@dataclass(frozen=True, slots=True)
class Submitted:
    """Result of a submit, or of its repeat."""

    revision: int
    cursor: int
    task_ids: Sequence[str]
    pending: int


class LeaseWait(StrEnum):
    """Why fewer leases than asked were given."""

    NO_TASKS = "no_tasks"
    AT_CAPACITY = "at_capacity"
    ENGINE_STALE = "engine_stale"
    PAUSED = "paused"
    BACKING_OFF = "backing_off"
    QUARANTINED = "quarantined"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class LeaseAsk:
    """A worker asks for up to max_tasks tasks."""

    worker_id: str
    instance_id: str
    request_id: str
    engine_id: str
    loaded: WeightVersion
    max_tasks: int


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """One lease. `spec` and `continuation` are the bytes that were stored, continuation empty when there is none."""

    lease_id: str
    task_id: str
    generation: int
    attempt: int
    spec: bytes
    continuation: bytes


@dataclass(frozen=True, slots=True)
class Leased:
    """Result of a lease request; `wait` is None when everything asked for was given."""

    revision: int
    grants: Sequence[LeaseGrant]
    wait: LeaseWait | None
    published: WeightVersion
    required_version: int
    ttl_ms: int


class ReturnKind(StrEnum):
    """Why a lease comes back."""

    INTERRUPTED = "interrupted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class LeaseReturn:
    """A lease handed back. `continuation` is a serialized wire Group, opaque here, empty for none.

    `head` is the smallest version of any kept first token (None without continuation); `tokens` counts kept response
    tokens.
    """

    lease_id: str
    kind: ReturnKind
    error: str
    continuation: bytes
    head: WeightVersion | None
    tokens: int


class ReturnOutcome(StrEnum):
    """What became of the task."""

    PENDING = "pending"
    FAILED = "failed"
    LOST = "lost"


class LeaseState(StrEnum):
    """What a heartbeat finds of a lease."""

    LIVE = "live"
    LOST = "lost"
    CANCELLED = "cancelled"
    """Its group could no longer be fresh: this very call took it back, later ones find it lost."""


@dataclass(frozen=True, slots=True)
class Extended:
    """Result of a heartbeat; `states` is in request order."""

    revision: int
    states: Sequence[LeaseState]
    ttl_ms: int


@dataclass(frozen=True, slots=True)
class Returned:
    """Result of a return, in request order."""

    revision: int
    outcomes: Sequence[ReturnOutcome]


# ── groups ───────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What the rules need to know of a pushed group. `lease_id` is empty for a push without a lease."""

    task_id: str
    generation: int
    lease_id: str
    environment: str
    samples: int
    tokens: int
    loss_tokens: int
    size_bytes: int
    """Length of the serialized wire Group that is stored."""
    head: WeightVersion
    tail: WeightVersion
    spans_versions: bool
    """True when tokens of the group came from more than one weight version."""
    mean_milli: int
    """Mean over all response tokens of the version that made each, in milli-versions, rounded down."""
    equal_rewards: bool
    """True when there are two or more samples and all have the same reward."""
    mean_reward_milli: int
    """Mean reward in milli-rewards, rounded down, within +-NO_REWARD_BOUND."""
    response_lengths: bytes
    """Response tokens of each sample, little-endian uint32."""
    rewards: bytes
    """Reward of each sample, little-endian float32."""
    min_response_tokens: int
    max_response_tokens: int
    response_tokens: int
    """Of all samples."""
    reward_milli: int
    """Sum of the samples' rewards, each rounded to milli-rewards, within +-NO_REWARD_BOUND."""
    turns: int
    """Turns of role assistant; a sample without turns has one."""
    truncated_samples: int
    """Samples with finish reason LENGTH."""


@dataclass(frozen=True, slots=True)
class NewGroup:
    """Facts and the serialized wire Group, stored untouched and returned byte for byte."""

    facts: GroupFacts
    body: Buffer = field(repr=False)


class PushKind(StrEnum):
    """What became of a pushed group."""

    QUEUED = "queued"
    DUPLICATE = "duplicate"
    CLOSED = "closed"
    REJECTED_FULL = "rejected_full"
    BLOCKED = "blocked"
    UNKNOWN_LEASE = "unknown_lease"
    FILTERED = "filtered"
    """Accepted, and ended by the run's filter."""
    INVALID = "invalid"
    """Could never be accepted: above a cap on its own, or a generation that does not exist yet."""


@dataclass(frozen=True, slots=True)
class Pushed:
    """Outcome for one group. `payload_key` is set for BLOCKED: the body stays stored under it for `retry_push`."""

    kind: PushKind
    group_id: str
    payload_key: str = ""
    field: str = ""
    """For INVALID: the field, with `value` and `limit` for the error."""
    value: str = ""
    limit: str = ""


@dataclass(frozen=True, slots=True)
class PushResult:
    """Outcomes in request order."""

    revision: int
    outcomes: Sequence[Pushed]
    published: WeightVersion


# ── batches ──────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Pull:
    """One try to pull a rank's shard of a round of a step; whole batches have round 0 only.

    train_version None: that of the step's earlier rounds, else the published version. batch_groups None: the policy's.
    """

    epoch: int
    step: int
    rank: int
    world_size: int
    train_version: int | None
    round: int = 0
    batch_groups: int | None = None


@dataclass(frozen=True, slots=True)
class ShardGroup:
    """One group of a shard; head and tail in the present timeline."""

    group_id: str
    payload_key: str
    sequence: int
    head_version: int
    tail_version: int


@dataclass(frozen=True, slots=True)
class Batch:
    """A closed round of a step as one rank sees it; totals are over all ranks and the step's rounds up to this one,
    hence the step's totals when `final`.
    """

    revision: int
    step: int
    round: int
    final: bool
    train_version: int
    total_groups: int
    total_samples: int
    total_tokens: int
    total_loss_tokens: int
    staleness_sum: int
    staleness_max: int
    shard: Sequence[ShardGroup]
    shard_tokens: int
    replayed: bool
    queued: int


@dataclass(frozen=True, slots=True)
class Short:
    """No round yet: what is queued, what the round needs, and on whom the pull waits."""

    revision: int
    step: int
    queued: int
    needed: int
    leased: int
    pending: int
    blocked_hint: str
    """"" or why nothing moves although there is work, e.g. `no worker has asked for a lease`."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Make (epoch, version) the published weights. `manifest` is a serialized wire WeightManifest, empty for none."""

    epoch: int
    version: int
    manifest: bytes
    commit_through: int | None
    clock: "TrainerClock | None" = None
    """The trainer's word on its time; None: it says nothing."""


@dataclass(frozen=True, slots=True)
class TrainerClock:
    """What a trainer did since its epoch began, in ms by its clock."""

    busy_ms: int
    wait_ms: int


@dataclass(frozen=True, slots=True)
class PlanCollective:
    """Announce a collective update to (epoch, version), or its next phase.

    `plan` is a serialized wire CollectivePlan, opaque here.
    """

    epoch: int
    version: int
    plan: bytes


@dataclass(frozen=True, slots=True)
class Published:
    """Result of a publish."""

    revision: int
    published: WeightVersion
    committed_steps: int


class ResumeMode(StrEnum):
    """What happens to batches at or after next_step."""

    REPLAY = "replay"
    REQUEUE = "requeue"
    DISCARD = "discard"


@dataclass(frozen=True, slots=True)
class Resume:
    """A trainer takes the run over; next_step None: after the last committed step."""

    next_step: int | None
    mode: ResumeMode
    request_id: str
    allow_regenerate: bool


@dataclass(frozen=True, slots=True)
class Resumed:
    """Result of a resume."""

    revision: int
    epoch: int
    next_step: int
    next_unassembled_step: int
    version: int
    cursor: int
    feeder_state: bytes


# ── state ────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class WeightsView:
    """The published weights of a run, and the collective update to newer ones that is under way (empty: none)."""

    revision: int
    published: WeightVersion
    manifest: bytes
    paused: bool
    plan: bytes = b""
    may_load: bool = True
    """False while as many engines as the policy allows are out of service for a load."""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What a worker says of an engine; `state` is one of starting, ready, loading, quarantined, stopped."""

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
    """The planned version that it is ready to receive."""
    weights_url: str = ""
    """Where peers get the versions that its worker has fetched; empty: nowhere."""
    decoded_tokens: int = 0
    """This and the next two: since the worker began with the engine. Tokens that it was sent."""
    decode_busy_ms: int = 0
    """Time in which at least one request decodes."""
    decode_request_ms: int = 0
    """Time of each request that decodes, summed."""
    wants_load: bool = False
    """Asks for a place among the engines that are out of service for a load; said with a report, not part of a view."""
    silent_ms: int = 0
    """In a view: time since the last report."""


@dataclass(frozen=True, slots=True)
class EngineReported:
    """Result of an engine's report."""

    revision: int
    published: WeightVersion
    may_load: bool


@dataclass(frozen=True, slots=True)
class Amount:
    """Sizes of a set of groups."""

    groups: int = 0
    samples: int = 0
    tokens: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """One event of a run's recording: `data` is packed, its fields are named in docs/recording.md."""

    event_id: str
    kind: str
    data: bytes


@dataclass(frozen=True, slots=True)
class TaskFailure:
    """A task that failed for good."""

    task_id: str
    attempts: int
    error: str
    time_ms: int


@dataclass(frozen=True, slots=True)
class RunView:
    """The whole state of a run.

    `groups` maps `accepted` and every GroupState to its Amount, `tasks` maps `submitted` and every TaskState to a
    count; what is queued, forming, delivered, pending and leased is counted from what exists. `environments` has the
    same Amounts for each environment of an accepted group. `statistics` has the fields of the wire's RunStatistics,
    among them those of window.TOTALS.
    """

    run_id: str
    policy: RunPolicy
    revision: int
    created_ms: int
    epoch: int
    published: WeightVersion
    next_step: int
    committed_steps: int
    checkpointed_steps: int
    world_size: int
    cursor: int
    paused: str
    draining: bool
    groups: dict[str, Amount]
    environments: dict[str, dict[str, Amount]]
    tasks: dict[str, int]
    statistics: dict[str, int]
    engines: Sequence[EngineReport]
    failures: Sequence[TaskFailure]
    window: Window | None = None
    """Between the oldest and the newest publish that are kept; None before the second one."""
    response_lengths: Sequence[int] = ()
    """Accepted samples by response length, LENGTH_BUCKETS counts."""
    environment_statistics: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """For each environment of an accepted group: `assembled_groups`, the totals of STALENESS,
    `accepted_response_tokens` and `assembled_response_tokens`."""
