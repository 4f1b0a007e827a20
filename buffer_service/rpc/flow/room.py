"""Room: memory of a process for messages on their way, in until the store has them, or out until gRPC has sent them.

Room is taken before a message is read, or fetched from the store. So a message that does not fit stays where it is: in
the client, held back by HTTP/2's flow control, or in the store. Who came first is served first, and nobody who holds
room waits for more of it. Room that a client keeps from others, because it neither sends nor reads, is taken back: its
RPC ends. So the streams on which something was sent last keep their room, and one that was idle is opened again when it
is needed.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Self

import grpc.aio

from buffer_wire.errors import NotReady

WAIT_S = 30.0
"""Longest wait for room; then the caller has to come again."""
STALLED_S = 5.0
"""Silence of a client, in the middle of something, after which others may have its room."""
POLL_S = 0.5
"""Period, in seconds, at which those who wait for room look for clients that have stalled."""

RawContext = grpc.aio.ServicerContext[bytes, bytes]

_REMEMBERED = 64
_FIRST_PART = 8


class GaveWay(NotReady):
    """A client kept room that others waited for."""


class Share:
    """Room that is held. Closed once or more, by whoever is the first to know that it is not needed any longer."""

    def __init__(self, room: "Room", size: int) -> None:
        self._room = room
        self._size = size

    @property
    def size(self) -> int:
        """Bytes of room that this share holds."""
        return self._size

    def resize(self, size: int) -> None:
        """Hold this much instead. More than there is may be held so: what is there is there, and others wait for it."""
        grown, self._size = size - self._size, size
        self._room.changed(grown)

    def close(self) -> None:
        """Give all of the room back."""
        self.resize(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Room:
    """Room of `limit_bytes` for one direction. `use` is told how much is held whenever that changes."""

    def __init__(self, limit_bytes: int, use: Callable[[int], None] = lambda _: None) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.moved_bytes = 0
        """Bytes of all that was ever held."""
        self._use = use
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._silent: dict[asyncio.Timeout, tuple[float, Share]] = {}
        """Waits for clients, the longest first, with the times from which they may be ended."""
        self._ending: list[Share] = []

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody holds."""
        return max(0, self.limit_bytes - self.used_bytes)

    @property
    def waiting(self) -> int:
        """Number of callers that wait for room."""
        return len(self._line)

    def take_spare(self, size: int) -> Share | None:
        """Room for `size` bytes that are not needed yet: where half of it stays free for those who come."""
        return self._take_now(size) if 2 * (self.used_bytes + size) <= self.limit_bytes else None

    def _take_now(self, size: int) -> Share | None:
        if self._line or not self._fits(size):
            return None
        self.changed(size)
        return Share(self, size)

    async def take(self, size: int, longest_s: float = WAIT_S) -> Share:
        """Room for `size` bytes, once those who came before have theirs. Raises NotReady after `longest_s`.

        What is larger than all the room is let in when it is empty.
        """
        share = self._take_now(size)
        if share is not None:
            return share
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((size, mine))
        try:
            await self._served(mine, longest_s)
        except BaseException:
            if mine.done():
                self.changed(-size)
            else:
                self._line.remove((size, mine))
                self._serve()
            raise
        return Share(self, size)

    async def _served(self, mine: "asyncio.Future[None]", longest_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + longest_s
        while not mine.done():
            left = deadline - loop.time()
            if left <= 0:
                raise NotReady(
                    f"{self.used_bytes} bytes of messages are on their way through this process, whose clients or "
                    f"store take their time, and {self.waiting - 1} others wait for room too (blocked_bytes); ask "
                    "again",
                    process="full",
                )
            self._end_silent(loop.time())
            await asyncio.wait([mine], timeout=min(POLL_S, left))

    @asynccontextmanager
    async def of_client(self, share: Share, patience_s: float = STALLED_S) -> AsyncIterator[None]:
        """A wait for the client for which `share` is held. Raises GaveWay when others need it after `patience_s`."""
        wait = asyncio.timeout(None)
        try:
            async with wait:
                self._silent[wait] = asyncio.get_running_loop().time() + patience_s, share
                yield
        except TimeoutError:
            if wait.expired():
                raise GaveWay(
                    f"this client has neither sent nor read anything for {patience_s:.0f} s, and others wait for the "
                    f"{share.size} bytes that this process holds for it (blocked_bytes); ask again"
                ) from None
            raise
        finally:
            self._silent.pop(wait, None)

    def changed(self, grown: int) -> None:
        """Count `grown` bytes more, or less."""
        self.used_bytes += grown
        self.moved_bytes += max(0, grown)
        self._use(self.used_bytes)
        if grown < 0:
            self._serve()

    def _fits(self, size: int) -> bool:
        return not self.used_bytes or self.used_bytes + size <= self.limit_bytes

    def _serve(self) -> None:
        while self._line and self._fits(self._line[0][0]):
            size, first = self._line.popleft()
            self.changed(size)
            first.set_result(None)

    def _end_silent(self, now: float) -> None:
        self._ending = [share for share in self._ending if share.size]
        missing = sum(size for size, _ in self._line) - self.free_bytes - sum(share.size for share in self._ending)
        for wait, (ending_from, share) in list(self._silent.items()):
            if missing <= 0:
                return
            if ending_from <= now and share.size:
                missing -= share.size
                del self._silent[wait]
                self._ending.append(share)
                wait.reschedule(now)


class Expected:
    """Expected size of the next message before it is read: the largest of the last `remembered` ones.

    `first` counts as one of them.
    """

    def __init__(self, first: int, remembered: int) -> None:
        self._sizes = deque([first], remembered)

    @property
    def size(self) -> int:
        """Bytes that the next message is expected to have."""
        return max(self._sizes)

    def saw(self, size: int) -> None:
        """A message was of this size."""
        self._sizes.append(size)


class Incoming:
    """Room for messages that clients send, and how large they are."""

    def __init__(self, room: Room) -> None:
        self.room = room
        # A first wave of large ones must not be let in all at once.
        self._expected = Expected(room.limit_bytes // _FIRST_PART, _REMEMBERED)

    def expected(self) -> Expected:
        """Expected size for one stream, whose next message is taken for as large as its last."""
        return Expected(self._expected.size, 1)

    async def read(
        self, context: RawContext, expected: Expected, longest_s: float = WAIT_S, patience_s: float = STALLED_S
    ) -> tuple[bytes | None, Share]:
        """The next message, None at the end of the client's side, and the room that it takes.

        Raises NotReady when there is no room for `longest_s`, GaveWay when the room is for others after `patience_s`.
        """
        share = await self.room.take(expected.size, longest_s)
        try:
            async with self.room.of_client(share, patience_s):
                message = await context.read()
        except BaseException:
            share.close()
            raise
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]
            share.close()
            return None, share
        size = len(message)
        share.resize(size)
        expected.saw(size)
        self._expected.saw(size)
        return message, share
