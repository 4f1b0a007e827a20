"""The line of pushes that wait for space: first come, first served, over all replicas.

Invariants: tickets rise along the line and are never given twice, each being the time (ms) when it was given or one
more than the last; whoever is touched within TICKET_MS keeps its place.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from buffer_service.domain.ops.groups import TICKET_MS


@dataclass(slots=True)
class Waiter:
    """A blocked push: its place, and when it last tried (ms)."""

    ticket: int
    touched: int


class PushLine:
    """Waiters by payload key, in order of their tickets."""

    def __init__(self) -> None:
        self.tickets = 0
        self._waiters: OrderedDict[str, Waiter] = OrderedDict()

    def __iter__(self) -> Iterator[tuple[str, Waiter]]:
        return iter(self._waiters.items())

    def is_empty(self, now: int) -> bool:
        """Tell whether nobody waits, after those at the head that have lapsed are taken out."""
        return self.admits("", now)

    def admits(self, payload_key: str, now: int) -> bool:
        """Tell whether it is this push's turn, after those at the head that have lapsed are taken out."""
        while self._waiters:
            key, waiter = next(iter(self))
            if now - waiter.touched <= TICKET_MS:
                return key == payload_key
            self.leave(key)
        return True

    def wait(self, payload_key: str, now: int) -> bool:
        """The push waits on, or joins at the end; whether it was given a ticket."""
        waiter = self._waiters.get(payload_key)
        if waiter is not None:
            waiter.touched = now
            return False
        self.tickets = max(self.tickets + 1, now)
        self._waiters[payload_key] = Waiter(self.tickets, now)
        return True

    def leave(self, payload_key: str) -> None:
        """The push waits no longer, if it did."""
        self._waiters.pop(payload_key, None)
