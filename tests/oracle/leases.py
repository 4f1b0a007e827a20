"""Live leases: who holds which task, and which are due.

Invariants: a task is in here exactly while it is leased; a worker's `leased` holds its tasks and no others.
"""

import heapq

from tests.oracle.engines import FORGOTTEN_MS
from tests.oracle.records import Lease, Task, Worker
from tests.oracle.rules.identity import LeaseId


class LeaseBook:
    """Leased tasks by id, by worker, and in order of expiry (a heap whose outdated entries are skipped)."""

    def __init__(self) -> None:
        self.tasks: dict[str, Task] = {}
        self.workers: dict[str, Worker] = {}
        self._expiries: list[tuple[int, int, Task]] = []

    def __len__(self) -> int:
        return len(self.tasks)

    def open(self, task: Task, lease: Lease) -> None:
        """The task is leased to a known worker."""
        task.lease = lease
        self.tasks[task.task_id] = task
        self.workers[lease.worker_id].leased[task.task_id] = task
        heapq.heappush(self._expiries, (lease.expiry, task.sequence, task))

    def prolong(self, task: Task, lease: Lease, expiry: int) -> None:
        """The lease lasts until `expiry`."""
        task.lease = Lease(lease.worker_id, lease.instance_id, expiry)
        heapq.heappush(self._expiries, (expiry, task.sequence, task))

    def close(self, task: Task) -> None:
        """The lease ends, if there is one."""
        if task.lease is not None:
            del self.tasks[task.task_id]
            del self.workers[task.lease.worker_id].leased[task.task_id]
            task.lease = None

    def live(self, lease_id: str, worker_id: str, instance_id: str, now: int) -> Task | None:
        """The task whose present lease this is, held by that process and not past its expiry."""
        parsed = LeaseId.parse(lease_id)
        task = self.tasks.get(parsed.task_id) if parsed else None
        if task is None or task.lease is None or task.lease_id != lease_id:
            return None
        lease = task.lease
        held = (lease.worker_id, lease.instance_id) == (worker_id, instance_id)
        return task if held and lease.expiry >= now else None

    def forget_silent(self, now: int) -> None:
        """Forget workers that are silent and hold no lease; one that holds a lease is looked at again after as long a
        silence.
        """
        for worker_id, worker in list(self.workers.items()):
            if worker.heard_ms >= now - FORGOTTEN_MS:
                continue
            if worker.leased or worker.evaluating:
                worker.heard_ms = now
            else:
                del self.workers[worker_id]

    def next_due(self, now: int) -> Task | None:
        """The leased task with the earliest expiry, when that is past; the lowest sequence among equals."""
        while self._expiries:
            expiry, _, task = self._expiries[0]
            if task.lease is not None and task.lease.expiry == expiry:
                return task if expiry < now else None
            heapq.heappop(self._expiries)
        return None
