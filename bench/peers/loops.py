"""Abilities of both ends of a side, and the source of the groups of a flow."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from bench.peers.groups import Columns, Sample, Size, template
from bench.peers.signals import Signals

BATCH = 32
"""Groups of a batch."""
WINDOW = 128
"""Groups pushed and not yet pulled, at most: a queue without bounds stays within memory."""
THREADS = 4
"""Threads of a producer that blocks."""
FULL_S = 0.001
"""Time after which a producer looks for room again."""

Group = tuple[int, Sequence[Sample]]


class End(Protocol):
    """Abilities of both ends."""

    def facts(self) -> dict[str, float]:
        """`direct`: the part of the bytes that did not go through the service; nothing where that is no question."""

    def close(self) -> None:
        """Close connections; a consumer acknowledges first what it pulled."""


class Producer(End, Protocol):
    """Abilities of a side's producer."""

    def push(self, group: Group) -> None:
        """Push a group; returns once it is accepted."""

    def flow(self, source: "Source") -> None:
        """Push what the source gives until it is over; returns once all is accepted."""


class Consumer(End, Protocol):
    """Abilities of a side's consumer."""

    def pull(self, count: int) -> Sequence[Columns]:
        """Wait for so many groups; what was pulled before is acknowledged for good first."""


class NoFacts:
    """End of a side with one way for its bytes."""

    def facts(self) -> dict[str, float]:
        """Nothing."""
        return {}


class Source:
    """Groups of a flow, for any threads of the producer."""

    def __init__(self, signals: Signals, size: Size, first: int) -> None:
        self._signals = signals
        self._size = size
        self._first = first
        self._lock = threading.Lock()
        self.given = 0

    @property
    def is_over(self) -> bool:
        """True once nothing more is to be pushed."""
        return self._signals.is_over

    def take(self, most: int = 1) -> list[Group]:
        """Up to `most` groups; none while the window is full."""
        with self._lock:
            count = max(0, min(most, self._signals.pulled + WINDOW - self.given))
            first = self._first + self.given
            self.given += count
            return [(uid, template(self._size, uid)) for uid in range(first, first + count)]


def in_threads(source: Source, pushes: Sequence[Callable[[list[Group]], None]], at_once: int = 1) -> None:
    """Flow of a producer that blocks: each of `pushes` is called by a thread of its own."""
    failed: list[BaseException] = []

    def work(push: Callable[[list[Group]], None]) -> None:
        try:
            while not source.is_over and not failed:
                if groups := source.take(at_once):
                    push(groups)
                else:
                    time.sleep(FULL_S)
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    threads = [threading.Thread(target=work, args=(push,)) for push in pushes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
