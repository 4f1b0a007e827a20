"""Drivers, which give an engine its work: the training's dispatcher, the evaluator, or both as one."""

import asyncio
from typing import Protocol

from rollout_workers.tasks.work import Stage


class Driver(Protocol):
    """Leases and works for one engine until it is told to stop."""

    @property
    def held(self) -> int:
        """Leases held now."""
        ...

    @property
    def generating(self) -> int:
        """Groups on the engine now."""
        ...

    @property
    def waiting_on(self) -> str:
        """Reason why the last lease request brought less than asked; empty when it did not."""
        ...

    async def run(self) -> None:
        """Work until `stop`; returns when all work has ended."""
        ...

    def stop(self) -> None:
        """Lease nothing more, and stop generating."""
        ...

    def cut(self, *stages: Stage) -> None:
        """Have the work in these stages handed back as it is."""
        ...


class Together:
    """Two drivers of one engine; what is waited for is the first one's business."""

    def __init__(self, first: Driver, second: Driver) -> None:
        self._first = first
        self._both = (first, second)

    @property
    def held(self) -> int:
        """Leases held now."""
        return sum(driver.held for driver in self._both)

    @property
    def generating(self) -> int:
        """Groups on the engine now."""
        return sum(driver.generating for driver in self._both)

    @property
    def waiting_on(self) -> str:
        """Reason why the first driver's last lease request brought less than asked."""
        return self._first.waiting_on

    async def run(self) -> None:
        """Run both drivers until both have ended."""
        async with asyncio.TaskGroup() as group:
            for driver in self._both:
                group.create_task(driver.run())

    def stop(self) -> None:
        """Stop both."""
        for driver in self._both:
            driver.stop()

    def cut(self, *stages: Stage) -> None:
        """Cut the work of both drivers."""
        for driver in self._both:
            driver.cut(*stages)
