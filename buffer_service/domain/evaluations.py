"""Evaluations: tasks that are generated wholly at one weight version, beside the training.

A task is pending → leased → finished or failed; a lease that is handed back or expires makes it pending again. Its
leases are those of all tasks (ops/tasks.py), but nothing of it is in the ledgers, the queue or the batches of its run.
Requests and results of the trainer's operations.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from buffer_service.domain.ops import WeightVersion
from buffer_wire.revision import Revision

MAX_EVALUATIONS = 64
"""Largest number of evaluations of a run, ended ones included, until they are deleted."""

MAX_STORED_BYTES = 1 << 30
"""Largest number of bytes that a run's evaluations may store: tasks without a result, and results."""

MAX_ATTEMPTS = 5
"""Failed attempts after which a task is given up."""

FAILURES_SHOWN = 100
"""Failed tasks that a view names, the first ones."""


@dataclass(frozen=True, slots=True)
class EvaluationTask:
    """A task to submit. `spec` is the serialized wire Task, opaque here."""

    task_id: str
    group_size: int
    spec: bytes


@dataclass(frozen=True, slots=True)
class SubmitEvaluation:
    """A new evaluation; version None: the published one. Equal digests mean equal content."""

    term: int
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
        """True when all tasks have ended, with a result or failed."""
        return self.ended == self.tasks


@dataclass(frozen=True, slots=True)
class EvaluationSubmitted:
    """Result of a submit; `created` is False for a repeat."""

    revision: Revision
    evaluation: EvaluationView
    created: bool


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
