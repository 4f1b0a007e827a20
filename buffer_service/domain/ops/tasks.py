"""Tasks and their leases."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from buffer_service.domain.ops.weights import WeightVersion
from buffer_wire.revision import Revision


@dataclass(frozen=True, slots=True)
class NewTask:
    """A task to submit. `spec` is the serialized wire Task, opaque here; an empty task_id asks for a generated one."""

    task_id: str
    group_size: int
    priority: int
    environment: str
    spec: bytes
    expected_tokens: int = 0
    """Length of its longest response, as its trainer expects it; 0: unknown."""
    metadata: bytes = b""
    """Metadata for the run's recording; empty: none, or too much of it."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Compare-and-set of the cursor together with tasks."""

    term: int
    request_id: str
    expected_cursor: int
    cursor: int
    feeder_state: bytes
    tasks: Sequence[NewTask]


@dataclass(frozen=True, slots=True)
class Submitted:
    """Result of a submit, or of its repeat."""

    revision: Revision
    cursor: int
    task_ids: Sequence[str]
    pending: int


@dataclass(frozen=True, slots=True)
class WrittenBlob:
    """Result of writing a blob."""

    revision: Revision
    blob_bytes: int
    """Bytes of all blobs of the run now."""


class LeaseWait(StrEnum):
    """Reason why fewer leases were given than asked for."""

    NO_TASKS = "no_tasks"
    AT_CAPACITY = "at_capacity"
    ENGINE_STALE = "engine_stale"
    PAUSED = "paused"
    BACKING_OFF = "backing_off"
    QUARANTINED = "quarantined"
    DRAINING = "draining"
    RATE_LIMITED = "rate_limited"


class TaskSink(StrEnum):
    """Place where the result of a task goes."""

    QUEUE = "queue"
    EVALUATIONS = "evaluations"
    """Results of an evaluation, whose tasks are pinned to a weight version."""


def sink_of(lease_id: str) -> TaskSink:
    """Sink of the task that a lease is of: only the id of an evaluation's task has an @."""
    return TaskSink.EVALUATIONS if "@" in lease_id else TaskSink.QUEUE


def is_of_stage(lease_id: str) -> bool:
    """True for the lease of a group that waits in a stage: no other id has a colon behind its last slash."""
    return ":" in lease_id.rpartition("/")[2] and "/" in lease_id


@dataclass(frozen=True, slots=True)
class LeaseAsk:
    """A worker asks for up to max_tasks tasks of one sink; of evaluations 0 only asks what is wanted.

    message_bytes: largest size of one reply. Several leases together get half of it for their specs and partial
    rollouts. A lease that needs more comes alone, and without its partial rollout where the two exceed message_bytes.
    """

    worker_id: str
    instance_id: str
    request_id: str
    engine_id: str
    loaded: WeightVersion
    max_tasks: int
    message_bytes: int = 64 << 20
    sink: TaskSink = TaskSink.QUEUE
    would_load: bool = False
    """The engine would load other weights for an evaluation: the reply says which."""


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """A lease of a task. `spec` and `partial_rollout` are the stored bytes, the latter empty when there is none.

    `task_id` is the id that the trainer gave the task, or the service for it.
    """

    lease_id: str
    task_id: str
    incarnation: int
    attempt: int
    spec: bytes
    partial_rollout: bytes
    pinned: WeightVersion | None = None
    """Weights that all of the group has to come from; None: any."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Weights that an evaluation with pending tasks waits for; manifest as it was published, empty for none."""

    version: WeightVersion
    manifest: bytes


@dataclass(frozen=True, slots=True)
class Leased:
    """Result of a lease request; `wait` is None when all that was asked for was given, or all that fits."""

    revision: Revision
    grants: Sequence[LeaseGrant]
    wait: LeaseWait | None
    published: WeightVersion
    required_version: int
    ttl_ms: int
    wanted: Wanted | None = None
    limited_environment: str = ""
    """Environment that may begin a group first, where the wait is RATE_LIMITED."""
    limited_for_ms: int = 0
    """Time until it may."""


@dataclass(frozen=True, slots=True)
class StageAsk:
    """A worker asks for up to max_groups groups that wait in a stage."""

    stage: str
    worker_id: str
    instance_id: str
    request_id: str
    max_groups: int


@dataclass(frozen=True, slots=True)
class AddedColumns:
    """Columns that a stage has added to a group, and where they lie."""

    stage: str
    payload_key: str


@dataclass(frozen=True, slots=True)
class StageLease:
    """A lease of a group that waits in a stage; head and tail in the present timeline."""

    lease_id: str
    group_id: str
    payload_key: str
    added: Sequence[AddedColumns]
    """Columns that earlier stages have added, in their order."""
    sequence: int
    head_version: int
    tail_version: int


@dataclass(frozen=True, slots=True)
class StageLeased:
    """Result of a request for groups of a stage."""

    revision: Revision
    leases: Sequence[StageLease]
    ttl_ms: int
    waiting: int
    """Groups that wait in the stage after these."""
    published: WeightVersion
    paused: str
    """Reason why the run is paused, empty while it is not."""


class ReturnKind(StrEnum):
    """Reason why a lease comes back."""

    INTERRUPTED = "interrupted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class LeaseReturn:
    """A lease handed back. `partial_rollout` is a serialized wire Group, opaque here, empty for none.

    `head` is the smallest version of any kept first token (None without partial rollout); `tokens` counts kept response
    tokens.
    """

    lease_id: str
    kind: ReturnKind
    error: str
    partial_rollout: bytes
    head: WeightVersion | None
    tokens: int
    checksum: int = 0
    """Checksum of the header and payload of `partial_rollout`, which its payload key names."""


class ReturnOutcome(StrEnum):
    """Outcome for the task of a returned lease."""

    PENDING = "pending"
    FAILED = "failed"
    LOST = "lost"


class LeaseState(StrEnum):
    """State of a lease, as a heartbeat finds it."""

    LIVE = "live"
    LOST = "lost"
    CANCELLED = "cancelled"
    """The lease's group could no longer be fresh: this very call took the lease back, later ones find it lost."""


@dataclass(frozen=True, slots=True)
class Extended:
    """Result of a heartbeat; `states` is in request order."""

    revision: Revision
    states: Sequence[LeaseState]
    ttl_ms: int


@dataclass(frozen=True, slots=True)
class Returned:
    """Result of a return, in request order."""

    revision: Revision
    outcomes: Sequence[ReturnOutcome]
