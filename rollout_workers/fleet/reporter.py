"""Tells the service where the engines stand: after every change, and once in a while without one.

Changes that come while a report is under way are sent together afterwards; the newest state is what counts. Reports
also carry the wish for a permit to load, and bring the answer (weights/permits.py); and they say what the engine has
decoded, for which none is sent. A report rides on the heartbeat of the worker's leases (service/heartbeats.py).
"""

import asyncio
import random
import time
from collections.abc import Sequence

from rollout_buffer.v1 import weights_pb2
from rollout_workers.changes import until_any
from rollout_workers.service.client import ServiceClient
from rollout_workers.slots.slot import EngineSlot
from rollout_workers.weights.permits import Permits
from rollout_workers.weights.watcher import WeightWatcher

REFRESH_S = 30.0
KEEP_PERMIT_S = 15.0
"""Time between two reports of an engine that has a permit: a permit lapses a minute after the last report that wants
it."""
ASK_AGAIN_S = (0.7, 1.5)
"""Range of the time between two questions for a permit, drawn at random, so that those who wait do not ask at once."""


class Reporter:
    """Reports one engine. `watcher`: what it hears may mean that there is a permit again."""

    def __init__(
        self, slot: EngineSlot, service: ServiceClient, watcher: WeightWatcher, permits: Permits, worker_id: str
    ) -> None:
        self._slot = slot
        self._permits = permits
        self._service = service
        self._watcher = watcher
        self._worker_id = worker_id
        self._heard = 0
        self._sent = weights_pb2.EngineReport()
        self._sent_wish = False
        self._sent_at = float("-inf")
        """Monotonic time of the last report."""
        self._rides = False
        """True when the next report is to go with what the worker is about to send."""

    async def run(self) -> None:
        """Report until cancelled."""
        slot = self._slot
        with self._service.heartbeats.riding(self._ride):
            while True:
                self._heard = self._watcher.messages
                self._sent, self._sent_wish = slot.report(self._worker_id), self._permits.wanted
                self._sent_at, self._rides = time.monotonic(), False
                reply = await self._service.report(slot.full_report(self._worker_id), wants_load=self._sent_wish)
                self._permits.answered(granted=self._sent_wish and reply.may_load)
                await until_any(self._is_news, slot.changes, self._watcher.changes, timeout_s=self._pause_s())

    def _ride(self) -> None:
        if time.monotonic() - self._sent_at > REFRESH_S / 2:
            self._rides = True
            self._slot.changes.notify()

    def _pause_s(self) -> float:
        if not self._permits.wanted:
            return REFRESH_S
        return KEEP_PERMIT_S if self._permits.granted else random.uniform(*ASK_AGAIN_S)  # noqa: S311 - spreads load

    def _is_news(self) -> bool:
        waits = self._permits.wanted and not self._permits.granted
        if self._rides:
            return True
        if waits and self._watcher.messages != self._heard:
            return True
        return self._permits.wanted != self._sent_wish or self._slot.report(self._worker_id) != self._sent


async def report_all(slots: Sequence[EngineSlot], service: ServiceClient, worker_id: str, *, timeout_s: float) -> None:
    """Send one last report of every engine, all at once. Raises RolloutBufferError."""
    await asyncio.gather(*(service.report(slot.full_report(worker_id), timeout_s=timeout_s) for slot in slots))
