"""Evaluations: tasks that are generated wholly at one weight version, beside the training.

A task is pending → leased → finished or failed; a lease that is handed back or expires makes it pending again. Nothing
of it is in the ledgers, the queue or the batches of its run. Requests and results of the operations, and what a store
has to offer for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from buffer_service.domain.ops import Buffer, LeaseWait, WeightVersion
from buffer_wire.revision import Revision

MAX_EVALUATIONS = 64
"""Largest number of evaluations of a run, ended ones included, until they are deleted."""

MAX_STORED_BYTES = 1 << 30
"""Largest number of bytes that a run's evaluations may store: tasks without a result, and results."""

MAX_ATTEMPTS = 5
"""Failed attempts after which a task is given up."""

FAILURES_SHOWN = 100
"""Failed tasks that a view names, the first ones."""

EXPIRED = "lease expired"


@dataclass(frozen=True, slots=True)
class EvaluationTask:
    """A task to submit. `spec` is the serialized wire Task, opaque here."""

    task_id: str
    group_size: int
    spec: bytes


@dataclass(frozen=True, slots=True)
class SubmitEvaluation:
    """A new evaluation; version None: the published one. Equal digests mean equal content."""

    epoch: int
    eval_id: str
    version: int | None
    digest: bytes
    tasks: Sequence[EvaluationTask]


@dataclass(frozen=True, slots=True)
class EvaluationFailure:
    """A task that was given up."""

    task_index: int
    task_id: str
    attempts: int
    error: str


@dataclass(frozen=True, slots=True)
class EvaluationView:
    """Progress of an evaluation; tasks = pending + leased + finished + failed."""

    eval_id: str
    version: WeightVersion
    tasks: int
    pending: int
    leased: int
    finished: int
    failed: int
    stored_bytes: int
    created_ms: int
    failures: Sequence[EvaluationFailure] = ()

    @property
    def ended(self) -> int:
        """Tasks of which nothing more comes."""
        return self.finished + self.failed

    @property
    def done(self) -> bool:
        """True when all have ended."""
        return self.ended == self.tasks


@dataclass(frozen=True, slots=True)
class EvaluationSubmitted:
    """Result of a submit; `created` is False for a repeat."""

    revision: Revision
    evaluation: EvaluationView
    created: bool


@dataclass(frozen=True, slots=True)
class EvaluationAsk:
    """A worker asks for up to max_tasks tasks of exactly the loaded version; 0 only asks what is wanted."""

    worker_id: str
    instance_id: str
    request_id: str
    engine_id: str
    loaded: WeightVersion
    max_tasks: int
    would_load: bool
    """The engine would load other weights: the reply says which."""


@dataclass(frozen=True, slots=True)
class EvaluationGrant:
    """A lease of an evaluation's task. `spec` are the bytes that were stored."""

    lease_id: str
    task_id: str
    version: WeightVersion
    attempt: int
    spec: bytes


@dataclass(frozen=True, slots=True)
class Wanted:
    """Weights that an evaluation with pending tasks waits for; manifest as it was published, empty for none."""

    version: WeightVersion
    manifest: bytes


@dataclass(frozen=True, slots=True)
class EvaluationLeased:
    """Result of a lease request; `wait` is None when everything asked for was given."""

    revision: Revision
    grants: Sequence[EvaluationGrant]
    wait: LeaseWait | None
    wanted: Wanted | None
    ttl_ms: int


class FinishKind(StrEnum):
    """Ways in which a lease of an evaluation's task ends."""

    GROUP = "group"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class FinishEvaluation:
    """The end of one lease. The fields from `body` on are those of a group: the serialized wire Group and what its
    header says.
    """

    worker_id: str
    instance_id: str
    lease_id: str
    kind: FinishKind
    error: str = ""
    body: Buffer = field(default=b"", repr=False)
    task_id: str = ""
    samples: int = 0
    head: WeightVersion = WeightVersion()  # noqa: RUF009 (frozen)
    tail: WeightVersion = WeightVersion()  # noqa: RUF009 (frozen)


class EvaluationOutcome(StrEnum):
    """Outcome for the task when a lease of it ends."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    CLOSED = "closed"
    PENDING = "pending"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """A task that has ended; `payload_key` is empty where it failed."""

    task_index: int
    task_id: str
    attempts: int
    error: str
    payload_key: str


@dataclass(frozen=True, slots=True)
class EvaluationResults:
    """A portion of the tasks that have ended, in order of their ending."""

    revision: Revision
    evaluation: EvaluationView
    results: Sequence[EvaluationResult]
