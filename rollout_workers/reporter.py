"""Tells the service where the engines stand: after every change, and once in a while without one.

Changes that come while a report is under way are sent together afterwards; the newest state is what counts.
"""

import asyncio
from collections.abc import Sequence

from rollout_buffer.v1 import weights_pb2
from rollout_workers.service import ServiceClient
from rollout_workers.slot import EngineSlot

REFRESH_S = 30.0


class Reporter:
    """Reports one engine."""

    def __init__(self, slot: EngineSlot, service: ServiceClient, worker_id: str) -> None:
        self._slot = slot
        self._service = service
        self._worker_id = worker_id
        self._sent = weights_pb2.EngineReport()

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            self._sent = self._slot.report(self._worker_id)
            await self._service.report(self._sent)
            await self._slot.changes.until(self._is_news, timeout_s=REFRESH_S)

    def _is_news(self) -> bool:
        return self._slot.report(self._worker_id) != self._sent


async def report_all(slots: Sequence[EngineSlot], service: ServiceClient, worker_id: str, *, timeout_s: float) -> None:
    """One last report of every engine, at once. Raises RolloutBufferError."""
    await asyncio.gather(*(service.report(slot.report(worker_id), timeout_s=timeout_s) for slot in slots))
