"""Time for the simulated engine, injected so that tests and planning need not wait for it."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that never go back, and a way to let some of them pass."""

    def now_s(self) -> float:
        """Seconds since an arbitrary start."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return when `seconds` have passed on this clock; at once, but not without yielding, for 0 or less."""
        ...


class WallClock:
    """Clock of real time."""

    def now_s(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))
