"""Pending tasks in the order in which they are leased.

Order: priority (higher first), then tasks that came back before fresh ones, then the task's sequence. A task that backs
off is passed over until its not_before. Invariant: `len` counts every pending task, those that back off included.
"""

import heapq
from collections.abc import Iterator

from buffer_service.domain.model.records import Task

_Entry = tuple[int, int, int, int, Task]


class PendingTasks:
    """A heap of tasks that may be leased and one of tasks that back off; removed tasks are skipped when met."""

    def __init__(self) -> None:
        self._ready: list[_Entry] = []
        self._backing_off: list[_Entry] = []
        self._tickets: dict[str, int] = {}
        self._issued = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, task: Task) -> bool:
        return task.task_id in self._tickets

    def add(self, task: Task) -> None:
        """A task became pending."""
        self._issued += 1
        self._tickets[task.task_id] = self._issued
        heapq.heappush(self._backing_off, (task.not_before, 0, task.sequence, self._issued, task))

    def remove(self, task: Task) -> None:
        """A task is pending no longer."""
        del self._tickets[task.task_id]

    def due(self, now: int) -> Iterator[Task]:
        """Tasks that may be leased, in order; each must be removed before the next is asked for."""
        while self._backing_off and self._backing_off[0][0] <= now:
            *_, ticket, task = heapq.heappop(self._backing_off)
            if self._tickets.get(task.task_id) == ticket:
                fresh = 0 if task.came_back else 1
                heapq.heappush(self._ready, (-task.priority, fresh, task.sequence, ticket, task))
        while self._ready:
            *_, ticket, task = self._ready[0]
            if self._tickets.get(task.task_id) == ticket:
                yield task
            else:
                heapq.heappop(self._ready)
