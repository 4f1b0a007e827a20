"""The evaluations of a run: what they consist of, and who works on them.

Invariant: a task is pending, leased, finished or failed, and has a lease exactly while it is leased.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from buffer_service.domain.ops import WeightVersion
from tests.oracle.records import Lease
from tests.oracle.rules.identity import EvaluationTaskId, LeaseId


@dataclass(slots=True, eq=False)
class Task:
    """One prompt of an evaluation."""

    index: int
    task_id: str
    group_size: int
    spec: bytes
    state: str = "pending"
    attempt: int = 0
    failures: int = 0
    not_before: int = 0
    lease: Lease | None = None
    error: str = ""
    payload_key: str = ""
    accepted: int = 0
    """The attempt whose group is the result; 0: none."""


@dataclass(slots=True, eq=False)
class Evaluation:
    """Tasks of one version. `number` tells it from a deleted one of the same id."""

    eval_id: str
    number: int
    version: WeightVersion
    digest: bytes
    manifest: bytes
    created_ms: int
    tasks: list[Task]
    ended: list[Task] = field(default_factory=list)
    stored_bytes: int = 0

    def count(self, state: str) -> int:
        """Tasks in a state."""
        return sum(task.state == state for task in self.tasks)

    def due(self, now: int) -> list[Task]:
        """Pending tasks that do not back off, in order of leasing."""
        pending = [task for task in self.tasks if task.state == "pending" and task.not_before <= now]
        return sorted(pending, key=lambda task: (task.not_before, task.index))

    def lease_id(self, task: Task) -> str:
        """Id of the present, or last, lease."""
        return str(LeaseId(self.task_id(task), 0, task.attempt))

    def task_id(self, task: Task) -> str:
        """Id of the task as leases name it."""
        return str(EvaluationTaskId(self.eval_id, self.number, task.index))


@dataclass(slots=True, eq=False)
class Book:
    """The evaluations of a run."""

    evaluations: dict[str, Evaluation] = field(default_factory=dict)

    @property
    def stored_bytes(self) -> int:
        """Stored bytes of all evaluations."""
        return sum(evaluation.stored_bytes for evaluation in self.evaluations.values())

    def leased(self) -> Iterator[tuple[Evaluation, Task, Lease]]:
        """All leases."""
        for evaluation in self.evaluations.values():
            for task in evaluation.tasks:
                if task.lease is not None:
                    yield evaluation, task, task.lease
