"""Keeps the leases of one engine alive, and says which have ended.

Heartbeats go out every third of the time to live, and soon after a publish, with which the service may take leases
back. A lease's time counts on this process's own clock, from before the request that granted or extended it was sent.
So the worker never believes a lease to live longer than the service does.

Only the service's answer ends a lease. While the service cannot be reached, work goes on, for its result counts as long
as nobody else has delivered one.
"""

import asyncio
import enum
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from buffer_wire.errors import RolloutBufferError
from rollout_buffer.v1 import tasks_pb2
from rollout_workers.changes import Changes
from rollout_workers.service.client import ServiceClient, on_whom, worth_waiting
from rollout_workers.weights.watcher import WeightWatcher

_MAX_PER_REQUEST = 4_096
_SHORTEST_BEAT_S = 0.05
_HURRY_S = 0.25
_log = structlog.get_logger()


class LeaseEnd(enum.StrEnum):
    """End of a lease that is no longer held, as a heartbeat learns of it."""

    LOST = enum.auto()
    """Lease that expired, whose task has a result, or that was released."""
    CANCELLED = enum.auto()
    """Lease that was taken back: its group could no longer be fresh enough to be trained."""


OnEnd = Callable[[LeaseEnd], None]

_LEVELS = {LeaseEnd.LOST: logging.WARNING, LeaseEnd.CANCELLED: logging.INFO}


@dataclass(slots=True)
class _Held:
    on_end: OnEnd
    renewed_at: float
    """Monotonic time before the request that granted or last extended it."""


class LeaseKeeper:
    """Heartbeats for the leases of one holder."""

    def __init__(self, holder: str, service: ServiceClient) -> None:
        self._holder = holder
        self._service = service
        self._held: dict[str, _Held] = {}
        self._ttl_s = 60.0
        self._changes = Changes()
        self._hurry_at = float("inf")
        """Monotonic time at which the next heartbeat goes out at the latest."""
        self._beat_at = float("-inf")
        """Monotonic time of the last heartbeat."""

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, lease: tasks_pb2.Lease, asked_at: float, on_end: OnEnd) -> None:
        """Keep a lease; `asked_at` is the monotonic time before its request, `on_end` is called at most once."""
        self._ttl_s = lease.ttl_ms / 1000
        self._held[lease.lease_id] = _Held(on_end, asked_at)
        self._changes.notify()

    def release(self, lease_id: str) -> None:
        """Forget a lease that has ended one way or another."""
        self._held.pop(lease_id, None)

    def expires_in_s(self, lease_id: str) -> float:
        """Time to live by this worker's clock; below 0 after its end, and for leases that are not held."""
        held = self._held.get(lease_id)
        return held.renewed_at + self._ttl_s - time.monotonic() if held else -1.0

    def hurry(self) -> None:
        """Send the next heartbeat soon: leases may have been taken back. All workers hear of it at once, so not now."""
        soon = time.monotonic() + random.uniform(0, _HURRY_S)  # noqa: S311 - spreads the workers
        self._hurry_at = min(self._hurry_at, soon)
        self._changes.notify()

    async def run(self) -> None:
        """Send heartbeats until cancelled. Raises RolloutBufferError for errors that no repeat can mend."""
        with self._service.heartbeats.riding(self._ride):
            while True:
                await self._changes.until(lambda: bool(self._held))
                await self._until_due()
                self._hurry_at, self._beat_at = float("inf"), time.monotonic()
                for batch in self._batches():
                    await self._beat(batch)

    def _ride(self) -> None:
        """Have the next heartbeat go with what the worker is about to send, where it would go soon."""
        now = time.monotonic()
        oldest = min((held.renewed_at for held in self._held.values()), default=now)
        if now - max(oldest, self._beat_at) > self._ttl_s / 6:
            self._hurry_at = now
            self._changes.notify()

    async def _until_due(self) -> None:
        """Wait for the end of the first third of the oldest lease's time, or for what is hurried."""
        await asyncio.sleep(_SHORTEST_BEAT_S)
        while (wait := (due_at := self._due_at()) - time.monotonic()) > 0:
            # A lease that was long in coming may be due earlier than those that were there.
            await self._changes.until(lambda due_at=due_at: self._due_at() < due_at, wait)  # type: ignore[misc]

    def _due_at(self) -> float:
        oldest = min((held.renewed_at for held in self._held.values()), default=float("-inf"))
        return min(oldest + self._ttl_s / 3, self._hurry_at)

    def _batches(self) -> list[list[str]]:
        ids = list(self._held)
        return [ids[at : at + _MAX_PER_REQUEST] for at in range(0, len(ids), _MAX_PER_REQUEST)]

    async def _beat(self, lease_ids: list[str]) -> None:
        asked_at = time.monotonic()
        try:
            reply = await self._service.extend(self._holder, lease_ids, timeout_s=self._ttl_s / 3)
        except RolloutBufferError as error:
            if not worth_waiting(error):
                raise
            first_s = min((self.expires_in_s(lease_id) for lease_id in self._held), default=0.0)
            why = f"{error}; by this worker's clock the first lease ends in {first_s:.0f} s, its work goes on"
            self._service.wait_log("keep leases").say(on_whom(error, self._service.address), why)
            return
        if reply.ttl_ms:
            self._ttl_s = reply.ttl_ms / 1000
        for lease_id, state in zip(lease_ids, reply.states, strict=True):
            held = self._held.get(lease_id)
            if held is None:
                continue
            if state == tasks_pb2.LEASE_STATE_LIVE:
                held.renewed_at = asked_at
            else:
                del self._held[lease_id]
                end = LeaseEnd.CANCELLED if state == tasks_pb2.LEASE_STATE_CANCELLED else LeaseEnd.LOST
                _log.log(_LEVELS[end], f"lease {end}", lease=lease_id)
                held.on_end(end)


async def hurry_after_publishes(watcher: WeightWatcher, keepers: Sequence[LeaseKeeper]) -> None:
    """Have all leases looked at whenever a version is published, until cancelled."""
    seen = watcher.latest
    while True:
        await watcher.changes.until(lambda seen=seen: watcher.latest != seen)  # type: ignore[misc]
        seen = watcher.latest
        for keeper in keepers:
            keeper.hurry()
