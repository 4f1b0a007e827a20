"""Calls about one thing that several make at the same time, joined to one.

A call leaves at once when none is under way. What comes meanwhile makes the next call, together. It leaves when it is
full, when a call before it ends, or when its first part has waited for LONGEST_S. Invariants: every part is in exactly
one call, and the parts of one call are in the order in which they came. Who gives up waiting takes no part back.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

LONGEST_S = 0.002
"""Longest wait, in seconds, for a call that is under way."""


class Part(Protocol):
    """A part of a call, of so many things and bytes."""

    @property
    def count(self) -> int:
        """Number of things."""
        ...

    @property
    def size_bytes(self) -> int:
        """Bytes that the call moves for it."""
        ...


T = TypeVar("T", bound=Part)


@dataclass(slots=True)
class _Traffic(Generic[T]):
    """The calls about one thing: how many are under way, and the next one."""

    under_way: int = 0
    parts: list[T] = field(default_factory=list)
    ends: list[asyncio.Future[None]] = field(default_factory=list)
    count: int = 0
    size_bytes: int = 0
    timer: asyncio.TimerHandle | None = None


class JoinedCalls(Generic[T]):
    """Calls by what they are about. `call` carries one out, of at least one part.

    A call has at most `most_count` things and `most_bytes`, or a single part.
    """

    def __init__(
        self, call: Callable[[str, Sequence[T]], Awaitable[None]], *, most_count: int, most_bytes: int
    ) -> None:
        self._call = call
        self._most_count = most_count
        self._most_bytes = most_bytes
        self._about: dict[str, _Traffic[T]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def join(self, about: str, part: T) -> None:
        """Return once the part was carried out. Raises what its call raised."""
        traffic = self._about.get(about)
        if traffic is None:
            traffic = self._about[about] = _Traffic()
        if not traffic.under_way or self._is_full(part.count, part.size_bytes):
            traffic.under_way += 1
            await self._carry_out(about, traffic, [part])
            return
        await self._take_part(about, traffic, part)

    def _take_part(self, about: str, traffic: _Traffic[T], part: T) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        if traffic.parts and not self._fits(traffic, part):
            self._start(about, traffic)
        if not traffic.parts:
            traffic.timer = loop.call_later(LONGEST_S, self._start, about, traffic)
        end = loop.create_future()
        traffic.parts.append(part)
        traffic.ends.append(end)
        traffic.count += part.count
        traffic.size_bytes += part.size_bytes
        if self._is_full(traffic.count, traffic.size_bytes):
            self._start(about, traffic)
        return end

    def _is_full(self, count: int, size_bytes: int) -> bool:
        return count >= self._most_count or size_bytes >= self._most_bytes

    def _fits(self, traffic: _Traffic[T], part: T) -> bool:
        return (
            traffic.count + part.count <= self._most_count and traffic.size_bytes + part.size_bytes <= self._most_bytes
        )

    def _start(self, about: str, traffic: _Traffic[T]) -> None:
        """Have the next call leave."""
        parts, ends, timer = traffic.parts, traffic.ends, traffic.timer
        traffic.parts, traffic.ends, traffic.count, traffic.size_bytes, traffic.timer = [], [], 0, 0, None
        if timer is not None:
            timer.cancel()
        traffic.under_way += 1
        # A task of no caller: who is cancelled must not end it for the others.
        task = asyncio.create_task(self._carry_out_for(about, traffic, parts, ends))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry_out_for(
        self, about: str, traffic: _Traffic[T], parts: Sequence[T], ends: Sequence[asyncio.Future[None]]
    ) -> None:
        failure: BaseException | None = None
        try:
            await self._carry_out(about, traffic, parts)
        except BaseException as error:
            failure = error
            if not isinstance(error, Exception):
                raise
        finally:
            for end in ends:
                if end.done():
                    continue
                if failure is None:
                    end.set_result(None)
                elif isinstance(failure, Exception):
                    end.set_exception(failure)
                else:
                    end.cancel()
            failure = None

    async def _carry_out(self, about: str, traffic: _Traffic[T], parts: Sequence[T]) -> None:
        try:
            await self._call(about, parts)
        finally:
            traffic.under_way -= 1
            if traffic.parts:
                self._start(about, traffic)
            elif not traffic.under_way:
                del self._about[about]
