"""Groups that can be asked for their first one, in any of a few ways.

A heap is made when its way is first asked for and kept up from then on; entries of groups that left, or whose versions
changed, are skipped when met. Invariant: a heap has an entry for every group that is in.
"""

import heapq
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from buffer_service.domain.policy import StalenessMeasure

_SLACK = 64
"""A heap may hold so many entries more than twice the groups before it is made anew."""


class Ranked(Protocol):
    """A group, as far as an index looks at it."""

    sequence: int
    """Number that no other group of the index has."""

    def age_milli(self, measure: StalenessMeasure) -> int:
        """The version by which it is measured, in milli-versions."""


_Group = TypeVar("_Group", bound=Ranked)


class First(StrEnum):
    """Order of groups, the first one first; ties by sequence."""

    OLDEST = "oldest"
    NEWEST = "newest"
    LEAST_HEAD = "head"
    LEAST_MEAN = "mean"
    LEAST_TAIL = "tail"

    @classmethod
    def stalest(cls, measure: StalenessMeasure) -> "First":
        """The stalest first, by that measure."""
        return cls(measure.value)


_RANKS: dict[First, Callable[[Ranked], int]] = {
    First.OLDEST: lambda group: group.sequence,
    First.NEWEST: lambda group: -group.sequence,
    First.LEAST_HEAD: lambda group: group.age_milli(StalenessMeasure.HEAD),
    First.LEAST_MEAN: lambda group: group.age_milli(StalenessMeasure.MEAN),
    First.LEAST_TAIL: lambda group: group.age_milli(StalenessMeasure.TAIL),
}


class GroupIndex(Generic[_Group]):
    """A set of groups."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        self._heaps: dict[First, list[tuple[int, int]]] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[_Group]:
        return iter(self._groups.values())

    def __contains__(self, group: _Group) -> bool:
        return self._groups.get(group.sequence) is group

    def add(self, group: _Group) -> None:
        """A group joins."""
        self._groups[group.sequence] = group
        for which, heap in self._heaps.items():
            heapq.heappush(heap, (_RANKS[which](group), group.sequence))
            if len(heap) > 2 * len(self._groups) + _SLACK:
                self._heaps[which] = self._heap(which)

    def remove(self, group: _Group) -> None:
        """A group leaves."""
        del self._groups[group.sequence]

    def first(self, which: First) -> _Group | None:
        """The first group in that way."""
        if which not in self._heaps:
            self._heaps[which] = self._heap(which)
        heap = self._heaps[which]
        while heap:
            rank, sequence = heap[0]
            group = self._groups.get(sequence)
            if group is not None and _RANKS[which](group) == rank:
                return group
            heapq.heappop(heap)
        return None

    def versions_changed(self) -> None:
        """Versions of the groups were clamped: what was ordered by them is out of order."""
        self._heaps.clear()

    def _heap(self, which: First) -> list[tuple[int, int]]:
        rank = _RANKS[which]
        heap = [(rank(group), group.sequence) for group in self]
        heapq.heapify(heap)
        return heap
