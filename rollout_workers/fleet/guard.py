"""Watches over one engine: notices when it is gone, has it started again if the worker owns it, and connects it anew.

An engine that answers and still fails call after call is cut off by its circuit breaker; the guard makes the trial
calls that close it again.

Invariants: a suspect engine gets no new work until it has answered a probe and names the weights it should hold; an
engine that comes back is taken for one with unknown weights: the loader brings it to the published version before it
works again.
"""

import asyncio
import time
from collections.abc import Sequence

import numpy as np
import structlog

from buffer_wire.connection.retry import Backoff
from rollout_workers.engine.errors import EngineError, EngineTimeout
from rollout_workers.engine.hosts import EngineHost
from rollout_workers.engine.types import SampleRequest
from rollout_workers.errors import EnginesLost
from rollout_workers.service.client import WaitLog
from rollout_workers.slots.engine_state import Event
from rollout_workers.slots.slot import EngineSlot
from rollout_workers.versions import BASE, Version

PROBE_S = 5.0
TRIAL_S = 30.0
"""Longest time for the one token that closes a circuit."""

_SECOND_PROBE_S = 0.2
_BACKOFF = Backoff(first_s=0.2, ceiling_s=5.0)
_SHORT_LIVES = Backoff(first_s=1.0, ceiling_s=60.0)
_LONG_LIFE_S = 60.0
_log = structlog.get_logger()


class EngineGuard:
    """Guards one engine; `all_slots` are those of the worker."""

    def __init__(
        self, slot: EngineSlot, host: EngineHost, all_slots: Sequence[EngineSlot], *, timeout_s: float
    ) -> None:
        self._slot = slot
        self._host = host
        self._all_slots = all_slots
        self._timeout_s = timeout_s
        self._doubts_seen = 0
        self._back_at = float("-inf")
        self._short_lives = _SHORT_LIVES.delays()
        """Waits before the next restart of an engine that was lost soon after the last one."""

    async def run(self) -> None:
        """Guard until cancelled. Raises EnginesLost when no engine of the worker was reachable for `timeout_s`."""
        slot = self._slot
        while True:
            pause_s = min(PROBE_S, slot.breaker.trial_in_s)
            await slot.changes.until(lambda: slot.suspect or slot.doubts != self._doubts_seen, timeout_s=pause_s)
            self._doubts_seen = slot.doubts
            if self._host.ended:
                await self._reconnect(await asyncio.to_thread(lambda: self._host.why_ended))
            elif slot.loading:
                # A paused engine is not ready by design.
                await slot.changes.until(lambda: not slot.loading, timeout_s=1.0)
            elif await self._answers() and await self._is_the_same():
                if slot.suspect:
                    slot.move(Event.ANSWERED)
                if slot.breaker.trial_in_s == 0:
                    await self._try_out()
            elif not slot.loading:
                await self._reconnect("it does not answer, or was started anew")

    async def _try_out(self) -> None:
        """Try the engine whose circuit is open and its pause over: one token decides whether it gets work again."""
        self._slot.breaker.tried()
        trial = SampleRequest(sample_index=0, input_ids=np.zeros(1, np.int32), max_new_tokens=1)
        try:
            await self._slot.generate([trial], deadline_s=TRIAL_S)
        except EngineError as error:
            self._slot.failed(error)

    async def _answers(self) -> bool:
        if await self._slot.engine.ready():
            return True
        await asyncio.sleep(_SECOND_PROBE_S)
        # A pause may have begun in between; then the next pass asks again.
        return self._slot.loading or await self._slot.engine.ready()

    async def _is_the_same(self) -> bool:
        """False when the engine was started anew between two probes: it says so, or has lost its weights."""
        slot = self._slot
        reloads, expected = slot.reloads, slot.loaded
        try:
            label = await slot.engine.loaded_version()
            if await self._was_restarted():
                return False
        except EngineError:
            return False
        if slot.loading or slot.reloads != reloads or not slot.current or slot.pristine:
            return True
        # A higher one is the business of whoever wrote the weights.
        return (Version.parse(label) or BASE) >= expected

    async def _was_restarted(self) -> bool:
        try:
            return await self._slot.engine.was_restarted()
        except EngineTimeout:
            return False  # It is busy, or is being paused: the next pass asks again.

    async def _reconnect(self, why: str) -> None:
        slot, began, delays = self._slot, time.monotonic(), _BACKOFF.delays()
        slot.move(Event.LOST)
        _log.error("engine lost", engine=slot.engine_id, address=slot.info.address, why=why)
        log = WaitLog(f"reach engine {slot.engine_id}")
        slot.last_error, slot.errors = why, slot.errors + 1
        if began - self._back_at < _LONG_LIFE_S:
            # What dies as soon as it works will do so again: not in a tight circle.
            await asyncio.sleep(next(self._short_lives))
        else:
            self._short_lives = _SHORT_LIVES.delays()
        while True:
            try:
                slot.engine = await self._host.revive()
                slot.info = await slot.engine.info()
                await slot.refresh()
                break
            except EngineError as error:
                slot.failed(error)
                # A machine that is gone closes no connection: without this, calls would wait until their deadlines.
                slot.engine.give_up(str(error))
                log.say(f"the engine at {slot.info.address}", str(error))
            nobody = not any(other.reachable for other in self._all_slots)
            if nobody and time.monotonic() - began > self._timeout_s:
                raise EnginesLost(f"no engine was reachable for {self._timeout_s:g} s; last error: {slot.last_error}")
            await asyncio.sleep(next(delays))
        self._back_at = time.monotonic()
        slot.move(Event.BACK)
        _log.info("engine is back", engine=slot.engine_id, after_s=round(time.monotonic() - began, 1))
