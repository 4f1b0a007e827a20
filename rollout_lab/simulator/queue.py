"""The simulated queue: groups by arrival, by staleness, and in the policy's order, over an index of them."""

from buffer_service.domain.policy import Order, StalenessMeasure
from rollout_lab.simulator.groups import SimulatedGroup
from rollout_lab.simulator.index import First, GroupIndex


class Queue:
    """Queued groups. There is one environment and one priority, so of the orders only the order of groups is left."""

    def __init__(self, order: Order, measure: StalenessMeasure) -> None:
        self._index = GroupIndex[SimulatedGroup]()
        self._stalest = First.stalest(measure)
        self._first = {
            Order.FIFO: First.OLDEST,
            Order.PRIORITY: First.OLDEST,
            Order.LIFO: First.NEWEST,
            Order.STALEST_FIRST: self._stalest,
        }[order]
        self._arrived = 0

    def __len__(self) -> int:
        return len(self._index)

    def add(self, group: SimulatedGroup) -> None:
        """A group arrives."""
        self._arrived += 1
        group.sequence = self._arrived
        self._index.add(group)

    def remove(self, group: SimulatedGroup) -> None:
        """A group leaves."""
        self._index.remove(group)

    def oldest(self) -> SimulatedGroup:
        """The group that arrived first."""
        return self._of(First.OLDEST)

    def stalest(self) -> SimulatedGroup:
        """The group that is stalest by the policy's measure."""
        return self._of(self._stalest)

    def take(self, count: int) -> list[SimulatedGroup]:
        """So many groups in the policy's order, out of the queue; there must be as many."""
        taken = []
        for _ in range(count):
            group = self._of(self._first)
            self.remove(group)
            taken.append(group)
        return taken

    def _of(self, first: First) -> SimulatedGroup:
        group = self._index.first(first)
        if group is None:
            raise LookupError("the queue is empty")
        return group
