"""Waits of lease requests for their first task.

Those for the queue stand in the run's line, first come, first served. Those for evaluations stand in none: what the
head of a line cannot use, as it has other weights, the next one may.
"""

import asyncio
from dataclasses import dataclass
from math import inf
from typing import assert_never

from buffer_service.domain import ops
from buffer_service.domain.ports import RunStore, Topic
from buffer_service.rpc.flow.waiting import WaitingLines
from buffer_wire.revision import Revision

_RECHECK_S = 20.0
"""Longest time between tries to lease of evaluations, longer than workers wait at a time. All engines of all runs wait
here, nearly always for nothing."""

_BACK_OFF_RECHECK_S = 0.5


@dataclass(frozen=True, slots=True)
class Leasing:
    """The lease requests of one replica."""

    store: RunStore
    lines: WaitingLines

    async def leased(self, run_id: str, ask: ops.LeaseAsk, seen: Revision, wait_s: float) -> ops.Leased:
        """Leases, or the reason why there are none by the end of the wait."""
        match ask.sink:
            case ops.TaskSink.QUEUE:
                return await self._of_queue(run_id, ask, seen, wait_s)
            case ops.TaskSink.EVALUATIONS:
                return await self._of_evaluations(run_id, ask, seen, wait_s)
            case _:
                assert_never(ask.sink)

    async def _of_queue(self, run_id: str, ask: ops.LeaseAsk, seen: Revision, wait_s: float) -> ops.Leased:
        found: list[ops.LeaseWait | None] = []

        def done(leased: ops.Leased) -> bool:
            found.append(leased.wait)
            return _ends_wait_for_queue(leased, found[0])

        return await self.lines.until(
            run_id,
            Topic.TASKS,
            lambda: self.store.lease(run_id, ask, seen_revision=seen),
            done,
            wait_s,
            # Of a limit that ends, nobody gives a hint.
            due_s=lambda leased: leased.limited_for_ms / 1_000 if leased.limited_for_ms else inf,
        )

    async def _of_evaluations(self, run_id: str, ask: ops.LeaseAsk, seen: Revision, wait_s: float) -> ops.Leased:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            ticket = self.lines.ticket(run_id, Topic.EVALUATIONS)
            leased = await self.store.lease(run_id, ask, seen_revision=seen)
            recheck_s = _recheck_of_evaluations(leased)
            if recheck_s is None or loop.time() >= deadline:
                return leased
            await self.lines.hint(run_id, Topic.EVALUATIONS, ticket, deadline, recheck_s)
            if loop.time() >= deadline and self.lines.ticket(run_id, Topic.EVALUATIONS) == ticket:
                # Nothing was heard since, so it is as it was; whoever asked asks again.
                return leased


def _ends_wait_for_queue(leased: ops.Leased, first: ops.LeaseWait | None) -> bool:
    """True when a request for the queue's tasks is answered with this; `first`: why its first try brought nothing."""
    match leased.wait:
        case (
            None
            | ops.LeaseWait.NO_TASKS
            | ops.LeaseWait.AT_CAPACITY
            | ops.LeaseWait.BACKING_OFF
            | ops.LeaseWait.RATE_LIMITED
        ):
            return bool(leased.grants)
        case ops.LeaseWait.ENGINE_STALE | ops.LeaseWait.QUARANTINED:
            # No wait changes it: the engine has to act first, and to ask again with what it has then.
            return True
        case ops.LeaseWait.PAUSED | ops.LeaseWait.DRAINING:
            # A worker is told at once as it arises. A request that finds the run so waits like any other.
            return leased.wait is not first
        case _:
            assert_never(leased.wait)


def _recheck_of_evaluations(leased: ops.Leased) -> float | None:
    """Longest time in seconds until the next try to lease of evaluations; None: the request is answered with this."""
    if leased.grants or leased.wanted:
        return None
    match leased.wait:
        case None | ops.LeaseWait.PAUSED | ops.LeaseWait.QUARANTINED:
            return None  # Of these no hint comes when they end.
        case ops.LeaseWait.BACKING_OFF:
            return _BACK_OFF_RECHECK_S
        case (
            ops.LeaseWait.NO_TASKS
            | ops.LeaseWait.AT_CAPACITY
            | ops.LeaseWait.ENGINE_STALE
            | ops.LeaseWait.DRAINING
            | ops.LeaseWait.RATE_LIMITED
        ):
            return _RECHECK_S
        case _:
            assert_never(leased.wait)
