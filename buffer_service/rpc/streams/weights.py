"""Published weights as a stream: the present state first, then every change; superseded ones may be skipped. The same
state is sent again when there is room among the engines that may load, after there was none.

However many workers watch a run on this replica, a change is read from the store once.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from buffer_service import commands
from buffer_service.domain import ops
from buffer_service.domain.ports import RunStore, Topic
from buffer_service.rpc.flow.ages import StreamAges
from buffer_service.rpc.flow.waiting import WaitingLines

FRESH_S = 0.5
"""Largest age, in seconds, of a shared reading when no hint came since; hints can be lost."""


@dataclass(slots=True)
class _Reading:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    watchers: int = 0
    view: ops.WeightsView | None = None
    ticket: int = -1
    taken_s: float = 0.0


class WeightsFeed:
    """The watches of one replica."""

    def __init__(self, store: RunStore, lines: WaitingLines, ages: StreamAges) -> None:
        self._store = store
        self._lines = lines
        self._ages = ages
        self._readings: dict[str, _Reading] = {}

    async def views(self, run_id: str) -> AsyncIterator[ops.WeightsView]:
        """Stream of the published weights, until its age. Raises UnknownRun, NotReady when the process shuts down."""
        reading = self._readings.setdefault(run_id, _Reading())
        reading.watchers += 1
        last: tuple[ops.WeightVersion, bytes, bool, bytes] | None = None
        might_load = True
        ends_at = self._ages.ends_at()
        try:
            while not self._ages.passed("WatchWeights", ends_at):
                ticket = self._lines.ticket(run_id, Topic.WEIGHTS)
                view = await self._read(run_id, reading)
                state = (view.published, view.manifest, view.paused, view.plan)
                # Whoever waits for a permit asks again when it hears anything.
                asks_again = view.may_load and not might_load
                might_load = view.may_load
                if state != last or asks_again:
                    last = state
                    yield view
                await self._lines.hint(run_id, Topic.WEIGHTS, ticket, ends_at)
        finally:
            reading.watchers -= 1
            if not reading.watchers:
                del self._readings[run_id]

    async def _read(self, run_id: str, reading: _Reading) -> ops.WeightsView:
        async with reading.lock:
            ticket = self._lines.ticket(run_id, Topic.WEIGHTS)
            if reading.view is None or reading.ticket != ticket or time.monotonic() - reading.taken_s > FRESH_S:
                reading.view = await self._store.call(commands.weights(run_id))
                reading.ticket = ticket
                reading.taken_s = time.monotonic()
            return reading.view
