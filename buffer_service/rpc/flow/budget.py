"""Bounds on what one process lets its clients have under way: streams, and bytes of pushes that are not acknowledged.

Memory is held by bytes: these, and the room that messages take (room.py), which an idle stream gives to those who wait.
So pushes and pulls are many at once, and the number of streams is a last bound. It is a close one for readers alone,
exports and reads of evaluations, whose bytes nobody counts.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from buffer_wire.errors import NotReady

READERS = 256, 192
"""Exports and reads of evaluations that a process serves at once, and of one token; each holds a few megabytes."""


class StreamSlots:
    """Slots for streams: `limit` at once, `per_token` of one token (0: no bound); one more is told to come again.

    `named`: names of the two bounds, for who is refused.
    """

    def __init__(
        self, limit: int, per_token: int = 0, named: tuple[str, str] = ("max_streams", "max_token_streams")
    ) -> None:
        self._limit = limit
        self._per_token = per_token
        self._named = named
        self._open: Counter[str] = Counter()

    @contextmanager
    def slot(self, token_id: str) -> Iterator[None]:
        """Hold a slot; `token_id` is empty for a caller without one. Raises NotReady when all are taken."""
        if self._open.total() >= self._limit:
            raise NotReady(
                f"{self._limit} streams are open, as many as this process serves ({self._named[0]}); ask again",
                process="full",
            )
        if token_id and self._per_token and self._open[token_id] >= self._per_token:
            raise NotReady(
                f"{self._per_token} streams of token {token_id!r} are open, as many as it may have at one process "
                f"({self._named[1]}); ask again",
                process="full",
            )
        self._open[token_id] += 1
        try:
            yield
        finally:
            self._open[token_id] -= 1
            if not self._open[token_id]:
                del self._open[token_id]


class ByteBudget:
    """Bytes that were read and are not acknowledged yet, over all push streams and unary pushes; they lie in the store.

    The size of a message is known only once it is read, so the budget decides whether to read. It is overdrawn by at
    most one message per stream. A unary push that finds no room is told to come again.
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
        """Add `size` bytes that were read. It never waits or raises, even when the budget is overdrawn."""
        self.used_bytes += size

    def give(self, size: int) -> None:
        """Count `size` bytes that were acknowledged, or abandoned."""
        self.used_bytes -= size
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    def refuse(self, size: int = 1) -> None:
        """Raise NotReady when `size` bytes do not fit beside the bytes that others hold."""
        if self.used_bytes and self.used_bytes + size > self.limit_bytes:
            raise NotReady(
                f"pushes of {self.used_bytes} bytes wait to be acknowledged, and {size} more than this process lets "
                f"wait ({self.limit_bytes}, blocked_bytes); push again"
            )

    @contextmanager
    def held(self, size: int) -> Iterator[None]:
        """Count `size` bytes of a unary push while it lasts. Raises NotReady when they do not fit."""
        self.refuse(size)
        self.take(size)
        try:
            yield
        finally:
            self.give(size)

    async def until(self, allowed: Callable[[], bool]) -> None:
        """Wait until `allowed`; asked again whenever bytes are given back."""
        while not allowed():
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.add(waiting)
            try:
                await waiting
            finally:
                self._waiting.discard(waiting)
