"""The simulated queue: groups by arrival, by staleness, and in the policy's order.

A heap is made when its rank is first asked for and kept up from then on; entries of groups that left are skipped when
met. Invariant: a heap has an entry for every group that is in.
"""

import heapq
from collections.abc import Callable

from buffer_service.domain.policy import Order, StalenessMeasure
from buffer_service.simulator.groups import SimulatedGroup

_Rank = Callable[[SimulatedGroup], int]
"""Rank of a group, the least one first; ties by arrival."""

_SLACK = 64
"""A heap may hold so many entries more than twice the groups before it is made anew."""


class Queue:
    """Queued groups. There is one environment and one priority, so of the orders only the order of groups is left."""

    def __init__(self, order: Order, measure: StalenessMeasure) -> None:
        self._groups: dict[int, SimulatedGroup] = {}
        self._heaps: dict[_Rank, list[tuple[int, int]]] = {}
        self._by_age: _Rank = lambda group: group.age_milli(measure)
        self._in_order = {
            Order.FIFO: _arrival,
            Order.SUBMISSION: _arrival,
            Order.PRIORITY: _arrival,
            Order.LIFO: lambda group: -group.sequence,
            Order.STALEST_FIRST: self._by_age,
        }[order]
        self._by_submission = order is Order.SUBMISSION
        self._arrived = 0

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: SimulatedGroup) -> None:
        """A group arrives."""
        if not self._by_submission:
            self._arrived += 1
            group.sequence = self._arrived
        self._groups[group.sequence] = group
        for rank, heap in self._heaps.items():
            heapq.heappush(heap, (rank(group), group.sequence))
            if len(heap) > 2 * len(self._groups) + _SLACK:
                self._heaps[rank] = self._heap(rank)

    def remove(self, group: SimulatedGroup) -> None:
        """A group leaves."""
        del self._groups[group.sequence]

    def count_below(self, end: int) -> int:
        """Count the groups whose number is below `end`."""
        return sum(number < end for number in self._groups)

    def oldest(self) -> SimulatedGroup:
        """The group that arrived first. Raises LookupError when there is none."""
        return self._first(_arrival)

    def stalest(self) -> SimulatedGroup:
        """The group that is stalest by the policy's measure. Raises LookupError when there is none."""
        return self._first(self._by_age)

    def take(self, count: int, below: int | None = None) -> list[SimulatedGroup]:
        """Take so many groups out of the queue; there must be as many. In the policy's order, but those whose head is
        `below` that version first, stalest first.
        """
        taken = []
        for _ in range(count):
            group = self._first(self._in_order) if below is None else self.stalest()
            if below is not None and group.head >= below:
                group = self._first(self._in_order)
            self.remove(group)
            taken.append(group)
        return taken

    def _first(self, rank: _Rank) -> SimulatedGroup:
        if rank not in self._heaps:
            self._heaps[rank] = self._heap(rank)
        heap = self._heaps[rank]
        while heap:
            group = self._groups.get(heap[0][1])
            if group is not None:
                return group
            heapq.heappop(heap)
        raise LookupError("the queue is empty")

    def _heap(self, rank: _Rank) -> list[tuple[int, int]]:
        heap = [(rank(group), group.sequence) for group in self._groups.values()]
        heapq.heapify(heap)
        return heap


def _arrival(group: SimulatedGroup) -> int:
    return group.sequence
