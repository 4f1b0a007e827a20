"""Pending tasks, by environment, in the order in which they are leased.

Order within an environment: priority (higher first), then tasks that came back before fresh ones, then the task's
sequence; between environments the mixture decides. A task that backs off is passed over until its not_before.
Invariant: `len` counts every pending task, those that back off included.
"""

import heapq
from collections.abc import Callable, Iterable

from tests.oracle.records import Task
from tests.oracle.rules.order import Mixture
from tests.oracle.rules.stride import Stride

_Entry = tuple[int, int, int, int, Task]


class PendingTasks:
    """A heap of tasks that may be leased for each environment, one of tasks that back off; removed tasks are skipped
    when met.
    """

    def __init__(self) -> None:
        self._ready: dict[str, list[_Entry]] = {}
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

    def environments(self, now: int) -> Iterable[str]:
        """Environments with a task that may be leased, but for their limits."""
        self._promote(now)
        return [environment for environment in list(self._ready) if self._first(environment) is not None]

    def pick(
        self, now: int, mixture: Mixture, turns: Stride, may: Callable[[str], bool] = lambda _environment: True
    ) -> Task | None:
        """The task that is leased next, of an environment that `may` begin one; it stays here, and its environment's
        turn is not taken yet.
        """
        firsts = {environment: self._first(environment) for environment in self.environments(now)}
        ready = {environment: task for environment, task in firsts.items() if task is not None and may(environment)}
        environment = mixture.turn(ready, turns)
        if environment is not None:
            return ready[environment]
        return min(ready.values(), key=lambda task: _rank(mixture, task), default=None)

    def _promote(self, now: int) -> None:
        """Tasks whose back-off is over may be leased."""
        while self._backing_off and self._backing_off[0][0] <= now:
            *_, ticket, task = heapq.heappop(self._backing_off)
            if self._tickets.get(task.task_id) == ticket:
                ready = self._ready.setdefault(task.environment, [])
                heapq.heappush(ready, (-task.priority, not task.came_back, task.sequence, ticket, task))

    def _first(self, environment: str) -> Task | None:
        ready = self._ready[environment]
        while ready:
            *_, ticket, task = ready[0]
            if self._tickets.get(task.task_id) == ticket:
                return task
            heapq.heappop(ready)
        del self._ready[environment]
        return None


def _rank(mixture: Mixture, task: Task) -> tuple[int, int, bool, int]:
    effective = mixture.priority(task.environment, task.priority)
    return (-effective, -task.priority, not task.came_back, task.sequence)
