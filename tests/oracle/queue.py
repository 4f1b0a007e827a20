"""Queued groups: in classes of environment and priority, and over all.

Groups in stages are in no class: batches do not take them. Invariants: every other group is in its class, and all are
in the whole; a class exists exactly while it holds groups; the sums are those of the groups that are in.
"""

from collections.abc import Callable, Iterator
from typing import assert_never

from buffer_service.domain.ops import Amount
from buffer_service.domain.policy import Order, RunPolicy, StalenessMeasure
from buffer_service.domain.quota import within_caps
from tests.oracle.index import First, GroupIndex
from tests.oracle.records import Group
from tests.oracle.rules.ledger import add
from tests.oracle.rules.order import Mixture
from tests.oracle.rules.stride import Stride


class GroupQueue:
    """The queue of a run."""

    def __init__(self) -> None:
        self._all = GroupIndex[Group]()
        self._ready = GroupIndex[Group]()
        self._classes: dict[str, dict[int, GroupIndex[Group]]] = {}
        self.tokens = 0
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._all)

    @property
    def ready(self) -> int:
        """Number of groups that batches may take."""
        return len(self._ready)

    @property
    def ready_tokens(self) -> int:
        """Tokens of these."""
        return sum(group.facts.tokens for group in self._ready)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._all)

    def __contains__(self, group: Group) -> bool:
        return group in self._all

    @property
    def classes(self) -> Iterator[tuple[str, int, GroupIndex[Group]]]:
        """Environment, priority, and the groups of each class."""
        for environment, priorities in self._classes.items():
            for priority, groups in priorities.items():
                yield environment, priority, groups

    def add(self, group: Group) -> None:
        """A group is queued."""
        self._all.add(group)
        self.tokens += group.facts.tokens
        self.bytes += group.facts.size_bytes
        if group.stage:
            return
        self._ready.add(group)
        priorities = self._classes.setdefault(group.environment, {})
        priorities.setdefault(group.task.priority, GroupIndex[Group]()).add(group)

    def remove(self, group: Group) -> None:
        """A group leaves."""
        self._all.remove(group)
        self.tokens -= group.facts.tokens
        self.bytes -= group.facts.size_bytes
        if group.stage:
            return
        self._ready.remove(group)
        priorities = self._classes[group.environment]
        priorities[group.task.priority].remove(group)
        if not priorities[group.task.priority]:
            del priorities[group.task.priority]
        if not priorities:
            del self._classes[group.environment]

    def oldest(self) -> Group | None:
        """The group with the lowest sequence."""
        return self._all.first(First.OLDEST)

    def stalest(self, measure: StalenessMeasure) -> Group | None:
        """The group made with the oldest versions, by that measure; the lowest sequence among equals."""
        return self._all.first(First.stalest(measure))

    def pick(self, mixture: Mixture, measure: StalenessMeasure, turns: Stride, end: int | None = None) -> Group | None:
        """The group that enters the next batch, its sequence below `end`; it stays here, and its environment's turn is
        not taken yet.
        """
        environment = mixture.turn(self._environments_below(end), turns)
        first, rank = _comparator(mixture, measure)
        if environment is not None:
            classes = list(self._classes[environment].values())
        elif mixture.order is Order.PRIORITY:
            classes = [groups for _, _, groups in self.classes]
        else:
            classes = [self._ready]
        heads = (groups.first(first) for groups in classes)
        return min((head for head in heads if head is not None), key=rank, default=None)

    def _environments_below(self, end: int | None) -> list[str]:
        """Environments with a group whose sequence is below `end`."""
        return [
            environment
            for environment, priorities in self._classes.items()
            if end is None or any(one.sequence < end for groups in priorities.values() for one in groups)
        ]

    def clamp(self, version: int) -> None:
        """Versions above `version` fall to it."""
        for group in self:
            group.clamp(version)
        self._all.versions_changed()
        self._ready.versions_changed()
        for _, _, groups in self.classes:
            groups.versions_changed()

    def fits(self, policy: RunPolicy, more: Amount | None = None) -> bool:
        """Tell whether the caps hold, with so much more."""
        queued = Amount(groups=len(self), tokens=self.tokens, bytes=self.bytes)
        return within_caps(policy, add(queued, more) if more else queued)


def ranked(mixture: Mixture, measure: StalenessMeasure) -> Callable[[Group], tuple[int, ...]]:
    """Tell by what an order compares groups."""
    return _comparator(mixture, measure)[1]


def _comparator(mixture: Mixture, measure: StalenessMeasure) -> tuple[First, Callable[[Group], tuple[int, ...]]]:
    """Tell how an order finds the first of a class, and by what it compares the firsts of several."""
    match mixture.order:
        case Order.FIFO | Order.SUBMISSION:
            return First.OLDEST, lambda group: (group.sequence,)
        case Order.LIFO:
            return First.NEWEST, lambda group: (-group.sequence,)
        case Order.STALEST_FIRST:
            return First.stalest(measure), lambda group: (group.age_milli(measure), group.sequence)
        case Order.PRIORITY:
            return First.OLDEST, lambda group: (
                -mixture.priority(group.environment, group.task.priority),
                -group.task.priority,
                group.sequence,
            )
        case _:
            assert_never(mixture.order)
