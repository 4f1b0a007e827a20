"""Bounds on what one process holds for its streams: slots for streams, bytes of pushes that wait to be acknowledged."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from buffer_wire.errors import NotReady


class StreamSlots:
    """At most `limit` streams at once; one more is told to come again."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open = 0

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold a slot. Raises NotReady when all are taken."""
        if self._open >= self._limit:
            raise NotReady(f"{self._open} streams are open, as many as this process serves (max_streams); ask again")
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1


class ByteBudget:
    """Bytes that were read and are not acknowledged yet, over all push streams of the process.

    The size of a message is known only once it is read, so the budget decides whether to read: it is overdrawn by
    at most one message per stream.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._waiting: set[asyncio.Future[None]] = set()

    @property
    def has_room(self) -> bool:
        """True when another message may be read."""
        return self.used_bytes < self.limit_bytes

    def take(self, size: int) -> None:
        """Count `size` bytes that were read."""
        self.used_bytes += size

    def give(self, size: int) -> None:
        """Count `size` bytes that were acknowledged, or abandoned."""
        self.used_bytes -= size
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    async def until(self, allowed: Callable[[], bool]) -> None:
        """Wait until `allowed`; asked again whenever bytes are given back."""
        while not allowed():
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.add(waiting)
            try:
                await waiting
            finally:
                self._waiting.discard(waiting)
