"""Lengths of sleeps against what was asked for, which tell a machine that is busy with other things."""

import asyncio
import time
from dataclasses import dataclass


@dataclass(slots=True)
class Sleeps:
    """Sleeps that ran to their end."""

    count: int = 0
    asked_s: float = 0.0
    slept_s: float = 0.0
    longest_over_s: float = 0.0

    def add(self, asked_s: float, slept_s: float) -> None:
        """Count one."""
        self.count += 1
        self.asked_s += asked_s
        self.slept_s += slept_s
        self.longest_over_s = max(self.longest_over_s, slept_s - asked_s)

    @property
    def mean_over_s(self) -> float:
        """Overshoot of a sleep."""
        return (self.slept_s - self.asked_s) / self.count if self.count else 0.0

    def sleep(self, seconds: float) -> None:
        """Sleep in this thread, and count it."""
        began = time.perf_counter()
        time.sleep(seconds)
        self.add(seconds, time.perf_counter() - began)


class CountedClock:
    """A Clock of the simulated engine, on the wall, whose sleeps are counted unless something else ends them."""

    def __init__(self) -> None:
        self.sleeps = Sleeps()

    def now_s(self) -> float:
        """See Clock."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """See Clock."""
        began = time.monotonic()
        await asyncio.sleep(max(0.0, seconds))
        if seconds > 0:
            self.sleeps.add(seconds, time.monotonic() - began)
