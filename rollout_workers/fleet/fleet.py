"""The engines of a worker at work: each with the parts that drive it, added and removed while the worker runs.

Invariant: an engine that is removed gets no new work, hands back what it was doing, and is reported as stopped.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from buffer_wire.errors import RolloutBufferError
from rollout_workers.engine.hosts import EngineHost
from rollout_workers.fleet.reporter import report_all
from rollout_workers.service.client import ServiceClient
from rollout_workers.slots.engine_state import Event
from rollout_workers.slots.slot import EngineSlot
from rollout_workers.tasks.drivers import Driver
from rollout_workers.tasks.keeper import LeaseKeeper
from rollout_workers.tasks.work import Stage

_LAST_REPORT_S = 1.0
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, eq=False)
class Seat:
    """Engine and everything that drives it. `parts` run until they are cancelled."""

    slot: EngineSlot
    host: EngineHost
    keeper: LeaseKeeper
    driver: Driver
    parts: Sequence[Coroutine[Any, Any, None]]
    is_reported: bool = True
    """False for an engine that works for evaluations only: the service knows nothing of it."""


class Fleet:
    """Seats whose tasks run in `group`."""

    def __init__(self, group: asyncio.TaskGroup, service: ServiceClient, worker_id: str) -> None:
        self._group = group
        self._service = service
        self._worker_id = worker_id
        self._tasks: dict[Seat, tuple[list[asyncio.Task[None]], asyncio.Task[None]]] = {}
        self._closing: set[Seat] = set()

    @property
    def seats(self) -> list[Seat]:
        """Seats at work, without those that are being closed."""
        return [seat for seat in self._tasks if seat not in self._closing]

    @property
    def working(self) -> list[asyncio.Task[None]]:
        """The drivers' tasks."""
        return [working for _, working in self._tasks.values()]

    def add(self, seat: Seat) -> None:
        """Put an engine to work."""
        parts = [self._group.create_task(part) for part in seat.parts]
        self._tasks[seat] = (parts, self._group.create_task(seat.driver.run()))

    async def remove(self, seat: Seat, *, grace_s: float, on_gone: Callable[[], None]) -> None:
        """Let an engine go; `on_gone` is called when it has no work left, before it is disconnected."""
        self._closing.add(seat)
        _log.info("engine leaves", engine=seat.slot.engine_id, leases=seat.driver.held)
        parts, working = self._tasks[seat]
        seat.driver.stop()
        await asyncio.wait([working], timeout=0.7 * grace_s)
        seat.driver.cut(*Stage)
        await asyncio.wait([working], timeout=0.2 * grace_s)
        for task in (*parts, working):
            task.cancel()
        await asyncio.wait([*parts, working])
        del self._tasks[seat]
        self._closing.discard(seat)
        on_gone()
        seat.slot.move(Event.STOPPED)
        if not seat.is_reported:
            await seat.host.close()
            return
        try:
            await report_all([seat.slot], self._service, self._worker_id, timeout_s=_LAST_REPORT_S)
        except RolloutBufferError as error:
            _log.warning("last report failed", engine=seat.slot.engine_id, error=str(error))
        await seat.host.close()

    def stop_parts(self) -> None:
        """Cancel everything but the drivers."""
        for parts, _ in self._tasks.values():
            for task in parts:
                task.cancel()
