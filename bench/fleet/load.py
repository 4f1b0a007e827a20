"""Load on a service: a process with thousands of calls, which tells what became of them and what it took itself."""

import asyncio
import resource
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

from bench.fleet.frames import Connection, Stream, headers
from bench.roles import Handler

T = TypeVar("T")

_PATIENCE_S = 60.0


@dataclass(slots=True)
class Opened:
    """Outcome of streams that were opened at once."""

    opened: int
    refused: int
    seconds: float


@dataclass(slots=True)
class Called:
    """Outcome of calls at a rate; times in seconds."""

    calls: int
    failed: int
    seconds: float
    times_s: list[float]


@dataclass(slots=True)
class _Call:
    """Messages of one stream, by the times at which they came."""

    at: list[float] = field(default_factory=list)
    ended: bool = False


class _Streams:
    """Streams that stay open, and connections for calls."""

    def __init__(self) -> None:
        self._connections: list[Connection] = []
        self._calls: list[_Call] = []
        self._changed = asyncio.Event()

    async def open(
        self, addresses: Sequence[str], streams: int, method: str, messages: Sequence[bytes], token: str, *, more: bool
    ) -> Opened:
        """Open streams over one connection to each address given, `streams` on each, all at once.

        Each sends the next of the messages; `more`: it does not end its side then, as a push stream does not.
        """
        connections = await asyncio.gather(*(Connection.connect(address) for address in addresses))
        self._connections += connections
        block, number = headers(method, token), count()
        started = time.monotonic()
        calls = []
        for connection in connections:
            for _ in range(streams):
                call = _Call()
                calls.append(call)
                message = messages[next(number) % len(messages)]
                connection.begin(block, message, self._stream(call), more=more)
        self._calls += calls
        await self._until(lambda: all(call.at or call.ended for call in calls))
        refused = sum(call.ended for call in calls)
        return Opened(len(calls) - refused, refused, time.monotonic() - started)

    async def told(self, number: int) -> list[float]:
        """Times at which the streams had message `number`, from 0; streams that have ended have none."""
        await self._until(lambda: all(len(call.at) > number or call.ended for call in self._calls))
        return [call.at[number] for call in self._calls if len(call.at) > number]

    def _stream(self, call: _Call) -> Stream:
        def message(_: bytes) -> None:
            call.at.append(time.monotonic())
            self._changed.set()

        def end() -> None:
            call.ended = True
            self._changed.set()

        return Stream(message, end)

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(_PATIENCE_S):
            while not holds():
                self._changed.clear()
                await self._changed.wait()
                await asyncio.sleep(0.01)

    async def call(
        self, addresses: Sequence[str], method: str, messages: Sequence[bytes], per_s: float, seconds: float
    ) -> Called:
        """Unary calls for `seconds`, `per_s` of them a second whether answered or not; 0: 64 at a time."""
        connections = await asyncio.gather(*(Connection.connect(address) for address in addresses))
        block, numbers = headers(method), count()
        called = Called(0, 0, 0.0, [])
        room = asyncio.Semaphore(64 if not per_s else 1 << 30)
        started = time.monotonic()

        def begin(due: float) -> None:
            answered: list[bytes] = []

            def end() -> None:
                called.calls += 1
                called.failed += not answered
                called.times_s.append(time.monotonic() - due)
                room.release()

            number = next(numbers)
            connection = connections[number % len(connections)]
            connection.begin(block, messages[number % len(messages)], Stream(answered.append, end))

        for number in count():
            await room.acquire()
            due = started + number / per_s if per_s else time.monotonic()
            if due - started > seconds:
                break
            if (wait := due - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            begin(due)
        async with asyncio.timeout(_PATIENCE_S):
            while called.calls < number:  # noqa: ASYNC110 - a clock as coarse as this suffices
                await asyncio.sleep(0.01)
        called.seconds = time.monotonic() - started
        for connection in connections:
            connection.close()
        return called

    async def close(self) -> None:
        """Close all streams."""
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        self._calls.clear()


def load() -> dict[str, Handler]:
    """Commands `open`, `told`, `call` and `close`, and `cpu` for the seconds that this process has taken so far."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    def on_loop(work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    streams = _Streams()

    def cpu() -> float:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime

    return {
        "open": lambda *arguments: on_loop(streams.open(*arguments[:-1], more=arguments[-1])),
        "told": lambda number: on_loop(streams.told(number)),
        "call": lambda *arguments: on_loop(streams.call(*arguments)),
        "close": lambda: on_loop(streams.close()),
        "cpu": cpu,
    }
