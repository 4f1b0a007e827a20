"""Queued groups: by sequence for batches and overflow, by head for the staleness gate.

Invariant: `tokens` and `bytes` are the sums over the groups that are in it.
"""

import heapq
from collections.abc import Iterator

from buffer_service.domain.model.records import Group
from buffer_service.domain.ops import GroupFacts
from buffer_service.domain.policy import RunPolicy


class GroupQueue:
    """Two heaps over the same groups; entries of groups that left are skipped when met."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self._oldest: list[int] = []
        self._stalest: list[tuple[int, int]] = []
        self.tokens = 0
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def add(self, group: Group) -> None:
        """A group is queued."""
        self._groups[group.sequence] = group
        heapq.heappush(self._oldest, group.sequence)
        heapq.heappush(self._stalest, (group.head, group.sequence))
        self.tokens += group.facts.tokens
        self.bytes += group.facts.size_bytes

    def remove(self, group: Group) -> None:
        """A group leaves."""
        del self._groups[group.sequence]
        self.tokens -= group.facts.tokens
        self.bytes -= group.facts.size_bytes

    def oldest(self) -> Group | None:
        """The group with the lowest sequence."""
        while self._oldest:
            group = self._groups.get(self._oldest[0])
            if group is not None:
                return group
            heapq.heappop(self._oldest)
        return None

    def stalest(self) -> Group | None:
        """The group with the lowest head; the lowest sequence among equals."""
        while self._stalest:
            head, sequence = self._stalest[0]
            group = self._groups.get(sequence)
            if group is not None and group.head == head:
                return group
            heapq.heappop(self._stalest)
        return None

    def clamp(self, version: int) -> None:
        """Heads and tails above `version` fall to it."""
        for group in self._groups.values():
            group.clamp(version)
        self._stalest = sorted((group.head, group.sequence) for group in self._groups.values())

    def fits(self, policy: RunPolicy, facts: GroupFacts | None = None) -> bool:
        """Whether the caps hold, with one more group when `facts` are given."""
        groups, tokens, size = (1, facts.tokens, facts.size_bytes) if facts else (0, 0, 0)
        return (
            len(self) + groups <= policy.max_queued_groups
            and (policy.max_queued_tokens == 0 or self.tokens + tokens <= policy.max_queued_tokens)
            and self.bytes + size <= policy.max_queued_bytes
        )
