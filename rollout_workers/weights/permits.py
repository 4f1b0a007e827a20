"""Permits for one engine to go out of service for a load, of which a run gives so many at once.

Invariant: `async with load(…)` gives back what it was granted, however it ends. An engine that gives way to something
newer before it was granted anything stays in line. The service hears of the wish, and answers it, in the engine's
reports (fleet/reporter.py): a report without the wish takes it back, so one task sends both.
"""

import enum
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rollout_buffer.v1 import weights_pb2
from rollout_workers.changes import until_any
from rollout_workers.service.client import WaitLog
from rollout_workers.slots.slot import EngineSlot
from rollout_workers.weights.watcher import WeightWatcher

_SAY_AGAIN_S = 10.0


class Turn(enum.Enum):
    """Progress of the engine's wish to be out of service."""

    NONE = enum.auto()
    IN_LINE = enum.auto()
    GRANTED = enum.auto()


class Permits:
    """Permits of one engine to be out of service for a load. `unlimited`: nobody else is to be asked."""

    def __init__(self, slot: EngineSlot, watcher: WeightWatcher, *, unlimited: bool = False) -> None:
        self._slot = slot
        self._watcher = watcher
        self._unlimited = unlimited
        self._turn = Turn.NONE
        self._log = WaitLog(f"take {slot.engine_id} out of service for a load")

    @property
    def wanted(self) -> bool:
        """True while the engine is in line, or has a permit."""
        return self._turn is not Turn.NONE

    @property
    def granted(self) -> bool:
        """True while the engine has a permit."""
        return self._turn is Turn.GRANTED

    @asynccontextmanager
    async def load(self, gives_way: Callable[[], bool]) -> AsyncIterator[bool]:
        """Wait until nothing holds the weights and the engine may go out of service; False when `gives_way()` was true
        before that.
        """
        with self._slot.phases.during(weights_pb2.RELOAD_PHASE_WAIT):
            permitted = await self._wait(gives_way)
        try:
            yield permitted
        finally:
            if permitted:
                self.leave()

    def leave(self) -> None:
        """Give the permit back, or leave the line."""
        self._become(Turn.NONE)

    def answered(self, *, granted: bool) -> None:
        """Take the answer to the wish; it counts for nothing when the wish was taken back meanwhile."""
        if self.wanted:
            self._become(Turn.GRANTED if granted else Turn.IN_LINE)

    def _become(self, turn: Turn) -> None:
        if turn is not self._turn:
            self._turn = turn
            self._slot.changes.notify()

    async def _wait(self, gives_way: Callable[[], bool]) -> bool:
        slot = self._slot
        while True:
            if slot.hold is not None:
                self.leave()
                await slot.hold.released()
            if gives_way():
                return False
            if not slot.leasable:
                return True  # It is out of service already.
            if not self.wanted:
                self._become(Turn.GRANTED if self._unlimited else Turn.IN_LINE)
            sources = self._watcher.changes, slot.changes
            while not await until_any(lambda: self.granted or gives_way(), *sources, timeout_s=_SAY_AGAIN_S):
                self._log.say("other engines that load, and the run's max_unavailable_engines", "no permit is free")
            if gives_way():
                return False
            if slot.hold is None or not slot.hold.active:
                return True
