"""Leases tasks of evaluations for one engine, and keeps the engine at their weights until they are made.

Invariants: a task is worked on only while the engine has exactly the version that its evaluation wants; what is not
made when the weights go is handed back, and made anew from nothing elsewhere. Before the weights go the service is
asked once more without waiting, so that an evaluation submitted before a publish finds its engine. Nothing of it meets
the queue or the counters of the training.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog

from buffer_wire.errors import RolloutBufferError
from rollout_buffer.v1 import tasks_pb2
from rollout_workers.changes import Changes, until_any
from rollout_workers.service.client import ServiceClient
from rollout_workers.slots.slot import EngineSlot
from rollout_workers.tasks.evaluation_target import EvaluationTarget
from rollout_workers.tasks.keeper import LeaseKeeper
from rollout_workers.tasks.leases import MAX_PER_REQUEST, EngineLeases
from rollout_workers.tasks.tools import Tools
from rollout_workers.tasks.work import Stage, Work
from rollout_workers.versions import Version

_QUICK_ANSWER_S = 0.05
_AFTER_QUICK_ANSWER_S = 2.0
_LAST_QUESTION_S = 5.0
_CLOSED_S = 60.0
"""Time without leases after the weights were held for the longest time, if they do not go then."""
_CLEAR_S = 10.0
_AGAIN_S = 0.5

_log = structlog.get_logger()


class Evaluator:
    """The evaluations of one engine; the slot's `hold`. `on_change` is called when the engine has more or less to do.

    `target`: given when the engine works for evaluations only, and so loads what they want.
    """

    def __init__(  # noqa: PLR0913 - what the worker's options say
        self,
        slot: EngineSlot,
        service: ServiceClient,
        keeper: LeaseKeeper,
        tools: Tools,
        *,
        concurrency: int,
        hold_s: float,
        lease_wait_s: float,
        on_change: Callable[[], None] | None = None,
        target: EvaluationTarget | None = None,
    ) -> None:
        self._slot = slot
        sink, would_load = tasks_pb2.TASK_SINK_EVALUATIONS, target is not None
        self._leases = EngineLeases(slot, service, keeper, tools, name="v", sink=sink, would_load=would_load)
        self._concurrency = concurrency
        self._hold_s = hold_s
        self._lease_wait_s = lease_wait_s
        self._on_change = on_change
        self._target = target
        self._changes = Changes()
        self._asking = asyncio.Lock()
        self._group: asyncio.TaskGroup | None = None
        self._stopping = False
        self._yielding = 0
        """Above 0 while the weights are to go: the waiting request is broken off."""
        self._closed_until = 0.0
        self.waiting_on = ""
        """Reason why the last lease request brought nothing; empty when it did not."""

    # ── what others see ──────────────────────────────────────────────────────

    @property
    def held(self) -> int:
        """Leases held now."""
        return len(self._leases.works)

    @property
    def generating(self) -> int:
        """Groups on the engine now."""
        return self._leases.generating

    @property
    def active(self) -> bool:
        """True while the engine has to keep its weights."""
        return self.generating > 0

    async def run(self) -> None:
        """Lease and work until `stop`; returns when all work has ended. Raises RolloutBufferError."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            leasing = group.create_task(self._lease_loop(), name=f"evaluations of {self._slot.engine_id}")
            watching = group.create_task(self._drop_outdated())
            await self._changes.until(lambda: self._stopping)
            leasing.cancel()
            await asyncio.wait([leasing])
            await self._leases.return_unseen()
            async with asyncio.TaskGroup() as interrupting:
                for work in list(self._leases.works.values()):
                    interrupting.create_task(work.interrupt())
            await self._changes.until(lambda: not self._leases.works)
            watching.cancel()

    def stop(self) -> None:
        """Lease nothing more, and stop generating."""
        self._stopping = True
        self._changes.notify()

    def cut(self, *stages: Stage) -> None:
        """Have the work in these stages handed back."""
        self._leases.cut(*stages)

    async def released(self) -> None:
        """Return when the engine's weights may go: nothing pending wants them, or they were held long enough."""
        deadline = time.monotonic() + self._hold_s
        self._yielding += 1
        self._changes.notify()
        try:
            while not self._stopping:
                asked_more = await self._ask_at_last(deadline)
                if not self.active and not asked_more:
                    return
                if not await self._changes.until(lambda: not self.active, deadline - time.monotonic()):
                    break
        finally:
            self._yielding -= 1
            self._changes.notify()
        if not self._stopping:
            await self._give_up_hold()

    # ── leasing ──────────────────────────────────────────────────────────────

    def _room(self) -> int:
        return min(self._leases.room(self._concurrency), MAX_PER_REQUEST)

    def _may_ask(self) -> bool:
        slot = self._slot
        fit = slot.leasable or self._target is not None
        return fit and not (slot.loading or self._yielding) and self._room() > 0

    async def _lease_loop(self) -> None:
        while True:
            await until_any(self._may_ask, self._slot.changes, self._changes, timeout_s=60.0)
            closed_s = self._closed_until - time.monotonic()
            if closed_s > 0:
                loaded = self._slot.loaded
                await self._slot.changes.until(lambda loaded=loaded: self._slot.loaded != loaded, closed_s)  # type: ignore[misc]
                self._closed_until = 0.0
            if not self._may_ask():
                continue
            began = time.monotonic()
            reply = await self._poll()
            if reply is None or reply.leases:
                continue
            if reply.HasField("wanted") and self._target is not None and not self._leases.works:
                await self._target.aim(self._slot, reply.wanted)
            elif time.monotonic() - began < _QUICK_ANSWER_S:
                # Not every wait is waited for at the service.
                await asyncio.sleep(_AFTER_QUICK_ANSWER_S)

    async def _poll(self) -> tasks_pb2.LeaseTasksResponse | None:
        """Send a request that waits for work; None when it was broken off because the weights are to go."""
        asking = asyncio.create_task(self._ask(self._lease_wait_s))
        yielding = asyncio.create_task(self._changes.until(lambda: self._yielding > 0 or self._stopping))
        try:
            await asyncio.wait({asking, yielding}, return_when=asyncio.FIRST_COMPLETED)
            return asking.result() if asking.done() else None
        finally:
            for task in (asking, yielding):
                task.cancel()
            await asyncio.gather(asking, yielding, return_exceptions=True)

    async def _ask(self, wait_s: float) -> tasks_pb2.LeaseTasksResponse:
        """Send one request. One that was broken off is repeated first, or in its place, and so brings what it was
        given.
        """
        async with self._asking:
            if self._leases.named not in (None, self._slot.loaded):
                # It named other weights: what it was given goes back.
                await self._send(0, 0.0)
            return await self._send(max(self._room(), 1) if self._slot.leasable else 0, wait_s)

    async def _send(self, max_tasks: int, wait_s: float) -> tasks_pb2.LeaseTasksResponse:
        reply = await self._leases.ask(max_tasks, wait_s)
        if self._stopping or self._group is None:
            return reply
        self.waiting_on = "" if reply.leases else "evaluations"
        unfit = []
        for lease in reply.leases:
            if not self._is_fit(lease):
                unfit.append(lease)
            elif lease.lease_id not in self._leases.works:
                self._leases.begin(self._group, lease, on_freed=self._notify_soon, on_end=self._notify)
        self._notify()
        # Until these have gone back the request counts as unanswered: one that is broken off here is repeated.
        await self._leases.hand_back(unfit)
        self._leases.answered()
        return reply

    def _is_fit(self, lease: tasks_pb2.Lease) -> bool:
        slot = self._slot
        return slot.leasable and not slot.loading and slot.loaded == Version.of(lease.pinned)

    def _notify_soon(self) -> None:
        # The work is at its next stage when whoever called this goes on.
        asyncio.get_running_loop().call_soon(self._notify)

    def _notify(self) -> None:
        self._slot.evaluating = self._leases.running
        self._changes.notify()
        if self._on_change is not None:
            self._on_change()

    # ── when the weights go ──────────────────────────────────────────────────

    async def _ask_at_last(self, deadline: float) -> bool:
        """Ask without waiting; True if there was something. A service that does not answer holds nothing up."""
        slot = self._slot
        if not slot.leasable or slot.loading or self._room() <= 0:
            return False
        try:
            async with asyncio.timeout(min(_LAST_QUESTION_S, max(deadline - time.monotonic(), 0.1))):
                return bool((await self._ask(0.0)).leases)
        except (TimeoutError, RolloutBufferError):
            return False  # What is to be said of it, the next waiting request says.

    async def _give_up_hold(self) -> None:
        """Give up the hold, as the weights were held for the longest time: work on the engine goes back, and nothing
        new comes.
        """
        self._closed_until = time.monotonic() + _CLOSED_S
        works = [work for work in self._leases.works.values() if work.on_engine]
        _log.warning("evaluation interrupted", engine=self._slot.engine_id, groups=len(works), held_s=self._hold_s)
        await self._take_off(works)

    async def _take_off(self, works: Sequence[Work]) -> None:
        """Have work handed back. What is still on the engine after a while is told again: an engine may hear of a
        request only after it was told to end it.
        """
        deadline = time.monotonic() + _CLEAR_S

        def on_engine() -> list[Work]:
            return [work for work in works if work.lease.lease_id in self._leases.works and work.on_engine]

        left = list(works)
        while left and time.monotonic() < deadline:
            async with asyncio.TaskGroup() as group:
                for work in left:
                    group.create_task(work.interrupt())
            await self._changes.until(lambda: not on_engine(), _AGAIN_S)
            left = on_engine()
        for work in left:
            work.cut()

    async def _drop_outdated(self) -> None:
        """Hand back work whose weights the engine does not have any more, whatever becomes of the engine."""
        slot = self._slot

        def outdated() -> list[Work]:
            return [work for work in self._leases.works.values() if work.pinned != slot.loaded or not slot.reachable]

        told: set[Work] = set()
        while True:
            await slot.changes.until(lambda told=told: not told.issuperset(outdated()), timeout_s=3_600.0)  # type: ignore[misc]
            new = [work for work in outdated() if work not in told]
            await self._take_off(new)
            # Others may have become outdated meanwhile.
            told = {*told, *new}.intersection(outdated())
