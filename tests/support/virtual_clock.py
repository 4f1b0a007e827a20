"""Time that passes only when everything else has come to rest, so that tests of hours take milliseconds."""

import asyncio
import heapq
import itertools
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

# Turns of the event loop after which nothing new happens by itself. The chains of wake-ups in the code under test are
# shorter; no input or output takes part.
_SETTLE_TURNS = 100


class VirtualClock:
    """A Clock whose sleepers wake in the order of their time, and only inside `run` and `pass_time`."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now_s(self) -> float:
        return self._now_s

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_s + max(0.0, seconds), next(self._order), future))
        await future

    async def settle(self) -> None:
        """Let everything run that can run without time passing."""
        for _ in range(_SETTLE_TURNS):
            await asyncio.sleep(0)

    async def pass_time(self, seconds: float) -> None:
        """Let `seconds` pass."""
        end_s = self._now_s + seconds
        await self.settle()
        while self._sleepers and self._sleepers[0][0] <= end_s:
            await self._wake_next()
        self._now_s = end_s

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Let time pass until `coroutine` is done; its result. Fails if nothing is left that could end it."""
        task = asyncio.create_task(coroutine)
        await self.settle()
        while not task.done():
            assert self._sleepers, "it waits for something else than time"
            await self._wake_next()
        return await task

    async def _wake_next(self) -> None:
        at_s, _, future = heapq.heappop(self._sleepers)
        if not future.done():
            self._now_s = at_s
            future.set_result(None)
            await self.settle()
