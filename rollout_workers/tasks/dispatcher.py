"""Leases tasks for one engine, up to its concurrency, and starts their work.

Invariants: at most as many samples are being generated as the groups of `limit` have, not counting single ones that are
generated anew; a group takes only the room of its samples that still run; at most `OUTSTANDING` times as many leases
are held, those being scored and pushed included; a lease request has an identity, so that one whose reply was lost is
asked again and grants the same leases; after `stop` nothing new begins, and what the last request may have granted is
handed back; while requests of others wait inside the engine, nothing is leased for it.
"""

import asyncio
import time

import structlog

from buffer_wire.connection.retry import Backoff
from rollout_buffer.v1 import tasks_pb2
from rollout_workers.service.client import ServiceClient
from rollout_workers.slots.inflight import InflightLimit
from rollout_workers.slots.slot import EngineSlot
from rollout_workers.tasks.keeper import LeaseKeeper
from rollout_workers.tasks.leases import MAX_PER_REQUEST, EngineLeases
from rollout_workers.tasks.tools import Tools
from rollout_workers.tasks.work import Stage
from rollout_workers.versions import Version

OUTSTANDING = 4
"""Leases held for each group on an engine: room for those being scored and pushed."""
_QUICK_ANSWER_S = 0.05
_AFTER_QUICK_ANSWER_S = 0.25
_AFTER_HELD_ANSWER_S = 2.0
_WARN_AFTER_S = 60.0
_HEAD_START_S = 0.05
"""Longest wait of an engine for a less loaded one of this worker to ask first."""
_CROWDED = Backoff(first_s=0.1, ceiling_s=1.0)

WAITS_ON = {
    tasks_pb2.LEASE_WAIT_NO_TASKS: "the trainer's feeder: no task is pending",
    tasks_pb2.LEASE_WAIT_AT_CAPACITY: "the trainer's pulls: the run admits no more work",
    tasks_pb2.LEASE_WAIT_ENGINE_STALE: "this engine's reload: its weights are too old",
    tasks_pb2.LEASE_WAIT_PAUSED: "an operator, or a trainer's resume: the run is paused",
    tasks_pb2.LEASE_WAIT_BACKING_OFF: "time: every pending task is backing off after a failure",
    tasks_pb2.LEASE_WAIT_QUARANTINED: "this engine's next successful reload: it is quarantined",
    tasks_pb2.LEASE_WAIT_DRAINING: "an operator, who may continue the run: it is being drained",
}
"""Parties on which an engine without work waits, by the kind of the wait."""

_HELD = (tasks_pb2.LEASE_WAIT_PAUSED, tasks_pb2.LEASE_WAIT_DRAINING)
"""Waits that only an operator or a trainer ends."""

_log = structlog.get_logger()


def _waits_on(reply: tasks_pb2.LeaseTasksResponse) -> str:
    if reply.wait == tasks_pb2.LEASE_WAIT_RATE_LIMITED:
        environment, wait_s = reply.limited_environment or "(none)", reply.limited_for_ms / 1_000
        return f"time: starts_per_minute of environment {environment} allow its next group in {wait_s:.1f} s"
    return WAITS_ON.get(reply.wait, "the service")


class Dispatcher:
    """The lease loop of one engine. `peers` are all of the worker."""

    def __init__(
        self,
        slot: EngineSlot,
        service: ServiceClient,
        keeper: LeaseKeeper,
        tools: Tools,
        *,
        limit: InflightLimit,
        lease_wait_s: float,
        peers: "list[Dispatcher] | tuple[()]" = (),
    ) -> None:
        self._slot = slot
        self._leases = EngineLeases(slot, service, keeper, tools, name="r")
        self._limit = limit
        self._lease_wait_s = lease_wait_s
        self._spread = tools.spread
        self._changes = slot.room
        self._stopping = False
        self._wants = False
        """True while the dispatcher is about to ask for leases."""
        self._peers = peers
        self._worked_at = time.monotonic()
        self._warned_at = 0.0
        self.waiting_on = ""
        """Reason why the last lease request brought less than asked; empty when it did not."""

    @property
    def held(self) -> int:
        """Leases held now."""
        return len(self._leases.works)

    @property
    def generating(self) -> int:
        """Groups on the engine now."""
        return self._leases.generating

    async def run(self) -> None:
        """Lease and work until `stop`; returns when all work has ended. Raises RolloutBufferError."""
        async with asyncio.TaskGroup() as group:
            leasing = group.create_task(self._lease_loop(group), name=f"leases of {self._slot.engine_id}")
            await self._changes.until(lambda: self._stopping)
            leasing.cancel()
            await asyncio.wait([leasing])
            # Before anything goes back, or this would lease it again.
            await self._leases.return_unseen()
            for work in list(self._leases.works.values()):
                group.create_task(work.interrupt())

    def stop(self) -> None:
        """Lease nothing more, and stop generating."""
        self._stopping = True
        self._changes.notify()

    def look_again(self) -> None:
        """Look again: something else on the engine has ended or begun."""
        self._changes.notify()

    def cut(self, *stages: Stage) -> None:
        """Have the work in these stages handed back as it is."""
        self._leases.cut(*stages)

    # ── leasing ──────────────────────────────────────────────────────────────

    def _room(self) -> int:
        guests = self._spread.guests(self._slot) if self._spread is not None else 0.0
        free = self._leases.room(self._limit.groups - self._slot.evaluating - guests)
        return min(free, int(OUTSTANDING * self._limit.groups) - self.held, MAX_PER_REQUEST)

    def _goes_on(self) -> bool:
        """False for one that stops: what its loop waits for is there at once, and the event loop would never go on."""
        return not self._stopping

    async def _lease_loop(self, group: asyncio.TaskGroup) -> None:
        while self._goes_on():
            if not await self._slot.changes.until(lambda: self._slot.leasable, timeout_s=_WARN_AFTER_S):
                self._idle(f"engine {self._slot.engine_id}: {self._slot.last_error or 'it is being loaded'}")
                continue
            await self._changes.until(lambda: self._room() > 0)
            if not await self._is_fit():
                continue
            await self._after_less_loaded()
            if self._room() <= 0:
                self._wants = False
                continue  # Evaluations have come in between.
            began, loaded = time.monotonic(), self._slot.loaded
            self._wants = False
            reply = await self._leases.ask(self._room(), self._lease_wait_s)
            if self._stopping:
                return
            self._leases.answered()
            for lease in reply.leases:
                self._limit.saw(lease.task.group_size)
                self._leases.begin(group, lease, on_freed=self._changes.notify, on_end=self._changes.notify)
            self.waiting_on = "" if reply.leases else _waits_on(reply)
            if reply.leases:
                self._worked_at = time.monotonic()
                continue
            if reply.wait != tasks_pb2.LEASE_WAIT_DRAINING:
                self._idle(self.waiting_on)
            if time.monotonic() - began < _QUICK_ANSWER_S:
                await self._after_quick_answer(reply.wait, loaded)

    async def _after_quick_answer(self, wait: "tasks_pb2.LeaseWait.ValueType", loaded: Version) -> None:
        """Wait after a quick answer, for not every wait is waited for at the service.

        A wait for newer weights than `loaded` ends with their load: a synchronous run would lose the rest of the pause
        with every step.
        """
        if wait == tasks_pb2.LEASE_WAIT_ENGINE_STALE:
            await self._slot.changes.until(lambda: self._slot.loaded != loaded, _AFTER_QUICK_ANSWER_S)
        else:
            await asyncio.sleep(_AFTER_HELD_ANSWER_S if wait in _HELD else _AFTER_QUICK_ANSWER_S)

    async def _is_fit(self) -> bool:
        """Wait until no requests of others wait in the engine; False once it takes no work, or the dispatcher stops."""
        slot, waits = self._slot, _CROWDED.delays()
        while slot.leasable and not self._stopping:
            self._wants = True
            await slot.load.ask(slot.engine, slot.in_flight)
            if not slot.load.is_crowded(slot.info.max_running_requests):
                return slot.leasable
            self._wants = False
            self.waiting_on = f"engine {slot.engine_id}: {slot.load.waiting} requests wait in it, others' among them"
            self._idle(self.waiting_on)
            await asyncio.sleep(next(waits))
            await slot.load.ask(slot.engine, slot.in_flight, max_age_s=0.0)
        self._wants = False
        return False

    async def _after_less_loaded(self) -> None:
        """Let dispatchers ask first whose engines have less to do: tasks may be few."""
        by = time.monotonic() + _HEAD_START_S
        while time.monotonic() < by and any(peer.is_ahead_of(self) for peer in self._peers):  # noqa: ASYNC110 - brief
            await asyncio.sleep(_HEAD_START_S / 5)

    @property
    def busy(self) -> float:
        """Requests on the engine for each that it decodes at once."""
        slot = self._slot
        return slot.load.requests(slot.in_flight) / max(slot.info.max_running_requests, 1)

    def is_ahead_of(self, other: "Dispatcher") -> bool:
        """True when this one is about to ask, has not asked yet, and its engine has less to do than `other`'s."""
        return self is not other and self._wants and self._leases.named is None and self.busy < other.busy

    def _idle(self, waiting_on: str) -> None:
        now = time.monotonic()
        if not self.held and now - max(self._worked_at, self._warned_at) >= _WARN_AFTER_S:
            self._warned_at = now
            idle_s = round(now - self._worked_at)
            _log.warning("no work", engine=self._slot.engine_id, for_s=idle_s, waiting_on=waiting_on)
