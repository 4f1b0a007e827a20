"""Waits of lease requests for their first task.

Those for the queue stand in the run's line, first come, first served. Those for evaluations stand in none: what the
head of a line cannot use, as it has other weights, the next one may.
"""

import asyncio
from dataclasses import dataclass

from buffer_service.domain import ops
from buffer_service.domain.ports import RunStore, Topic
from buffer_service.rpc.flow.waiting import WaitingLines
from buffer_wire.revision import Revision

_POINTLESS = frozenset({ops.LeaseWait.ENGINE_STALE, ops.LeaseWait.QUARANTINED})
"""Reasons that no wait for the queue changes: the engine has to act first, and to ask again with what it has then."""

_STOPPED = frozenset({ops.LeaseWait.PAUSED, ops.LeaseWait.DRAINING})
"""Reasons that end a wait as they arise: the worker is told at once. One that finds the run so waits like any other."""

_TOLD_AT_ONCE = frozenset({ops.LeaseWait.PAUSED, ops.LeaseWait.QUARANTINED})
"""Reasons for which no request for evaluations waits: no hint comes when they end."""

_RECHECK_S = 10.0
"""Longest time between tries to lease of evaluations. All engines of all runs wait here, nearly always for nothing."""

_BACK_OFF_RECHECK_S = 0.5


@dataclass(frozen=True, slots=True)
class Leasing:
    """The lease requests of one replica."""

    store: RunStore
    lines: WaitingLines

    async def leased(self, run_id: str, ask: ops.LeaseAsk, seen: Revision, wait_s: float) -> ops.Leased:
        """Leases, or the reason why there are none by the end of the wait."""
        if ask.sink is ops.TaskSink.EVALUATIONS:
            return await self._of_evaluations(run_id, ask, seen, wait_s)
        found: list[ops.LeaseWait | None] = []

        def done(leased: ops.Leased) -> bool:
            found.append(leased.wait)
            if leased.wait in _STOPPED:
                return leased.wait is not found[0]
            return bool(leased.grants) or leased.wait in _POINTLESS

        return await self.lines.until(
            run_id, Topic.TASKS, lambda: self.store.lease(run_id, ask, seen_revision=seen), done, wait_s
        )

    async def _of_evaluations(self, run_id: str, ask: ops.LeaseAsk, seen: Revision, wait_s: float) -> ops.Leased:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            ticket = self.lines.ticket(run_id, Topic.EVALUATIONS)
            leased = await self.store.lease(run_id, ask, seen_revision=seen)
            told = leased.grants or leased.wanted or leased.wait is None or leased.wait in _TOLD_AT_ONCE
            if told or loop.time() >= deadline:
                return leased
            longest_s = _BACK_OFF_RECHECK_S if leased.wait is ops.LeaseWait.BACKING_OFF else _RECHECK_S
            await self.lines.hint(run_id, Topic.EVALUATIONS, ticket, deadline, longest_s)
