"""Workers of a history: they lease, generate, extend, push and hand back through the worker's own client and pusher,
and do everything that workers must not do: forget leases, push too late and twice, die in the middle.
"""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from buffer_wire.errors import RolloutBufferError
from buffer_wire.payloads.writer import PayloadWriter
from rollout_buffer.v1 import groups_pb2, tasks_pb2
from rollout_workers.counters import Counters
from rollout_workers.service.client import ServiceClient
from rollout_workers.service.pusher import Pusher
from rollout_workers.versions import BASE, Version
from tests.faults.history import History, gather_or_cancel
from tests.faults.made_groups import Made, digest, make, versions_of

LEASE_TTL_S = 1.0
LEASE_WAIT_S = 0.3
PATIENCE_S = 90.0
GENERATION_S = 0.02
"""Longest time that a group takes."""
LIVES = (12, 40)
"""Lease requests of a worker before it dies and a new one takes its name."""


class TellingClient(ServiceClient):
    """The worker's client, which also tells the history what it met while it repeated a call."""

    def __init__(self, address: str, run_id: str, instance_id: str, name: str, history: History) -> None:
        super().__init__(address, run_id, instance_id=instance_id, timeout_s=PATIENCE_S)
        self._name = name
        self._history = history

    def met(self, error: RolloutBufferError) -> bool:
        self._history.note(self._name, "met", reason=error.reason)
        return super().met(error)


@dataclass(frozen=True)
class _Forgotten:
    lease: tasks_pb2.Lease
    made: Made
    since: float


@dataclass
class Worker:
    """One worker's name; its processes come and go."""

    name: str
    run_id: str
    history: History
    rng: random.Random
    target: Callable[[], str]
    calm: Callable[[], bool]
    """True once it is to finish what there is, and do nothing that keeps tasks open."""
    loaded: Version = BASE
    counters: Counters = field(default_factory=Counters)
    """Counters of all its lives."""
    lives: int = 0
    _forgotten: list[_Forgotten] = field(default_factory=list)

    async def run(self) -> None:
        """Live until cancelled."""
        while True:
            self.lives += 1
            instance = f"{self.name}-{self.lives}"
            service = TellingClient(self.target(), self.run_id, instance, self.name, self.history)
            writer = PayloadWriter(self.run_id, self.name, partial(service.write_access, self.name))
            pusher = Pusher(service, self.counters, writer)
            pushing = asyncio.create_task(pusher.run())
            living = asyncio.create_task(_Life(self, service, pusher, instance).run())
            # It may be cancelled at its end too, and leaves no connection then either.
            async with AsyncExitStack() as at_the_end:
                at_the_end.push_async_callback(service.close)
                at_the_end.push_async_callback(writer.close)
                at_the_end.push_async_callback(gather_or_cancel, living, pushing)
                await asyncio.wait({pushing, living}, return_when=asyncio.FIRST_COMPLETED)


@dataclass
class _Life:
    """One process of a worker, until it dies."""

    worker: Worker
    service: ServiceClient
    pusher: Pusher
    instance: str

    def __post_init__(self) -> None:
        self.history, self.rng, self.name = self.worker.history, self.worker.rng, self.worker.name
        self.requests = 0

    async def run(self) -> None:
        for _ in range(self.rng.randint(*LIVES)):
            leases = await self._lease()
            async with asyncio.TaskGroup() as tasks:
                for lease in leases:
                    tasks.create_task(self._work_on(lease))
                tasks.create_task(self._remember())
        if not self.worker.calm():
            # It dies with a request under way: the leases that it may get are nobody's.
            dying = asyncio.create_task(self._lease())
            await asyncio.sleep(0)
            await gather_or_cancel(dying)

    # ── calls ────────────────────────────────────────────────────────────────

    async def _lease(self) -> list[tasks_pb2.Lease]:
        self.requests += 1
        request_id, loaded, most = f"{self.instance}-{self.requests}", self.worker.loaded, self.rng.randint(1, 3)
        given = {"worker": self.name, "instance": self.instance, "request_id": request_id, "max_tasks": most}
        async with self.history.call(self.name, "lease", **given, loaded=[loaded.term, loaded.version]) as op:
            reply = await self.service.lease(self.name, request_id, loaded, max_tasks=most, wait_s=LEASE_WAIT_S)
            op.reply = {
                "leases": [_lease_facts(lease) for lease in reply.leases],
                "wait": tasks_pb2.LeaseWait.Name(reply.wait),
                "published": [reply.published.term, reply.published.version],
                "revision": reply.revision,
            }
        if self.rng.random() < 0.7 or reply.wait == tasks_pb2.LEASE_WAIT_ENGINE_STALE:
            self.worker.loaded = Version.of(reply.published)
        return list(reply.leases)

    async def _push(self, made: Made) -> None:
        async with self.history.call(self.name, "push", worker=self.name, **made.facts()) as op:
            result = await self.pusher.push(made.header, made.payload)
            op.reply = {"outcome": result.outcome, "error": result.error.reason if result.error else ""}

    async def _extend(self, lease: tasks_pb2.Lease) -> bool:
        given = {"worker": self.name, "instance": self.instance, "leases": [lease.lease_id]}
        async with self.history.call(self.name, "extend", **given) as op:
            reply = await self.service.extend(self.name, [lease.lease_id], timeout_s=PATIENCE_S)
            op.reply = {"states": _names(reply)}
        return reply.states[0] == tasks_pb2.LEASE_STATE_LIVE

    async def _meddle(self, lease: tasks_pb2.Lease) -> None:
        """Somebody else extends the lease, which is not his."""
        meddler = f"{self.name}-meddler"
        given = {"worker": meddler, "instance": meddler, "leases": [lease.lease_id]}
        async with self.history.call(meddler, "extend", **given) as op:
            reply = await self.service.extend(meddler, [lease.lease_id], timeout_s=PATIENCE_S)
            op.reply = {"states": _names(reply)}

    async def _give_back(self, lease: tasks_pb2.Lease, *, failed: bool, partial_rollout: Made | None) -> None:
        returned = tasks_pb2.LeaseReturn(
            lease_id=lease.lease_id,
            kind=tasks_pb2.RETURN_KIND_FAILED if failed else tasks_pb2.RETURN_KIND_INTERRUPTED,
            error="made to fail" if failed else "",
            partial_rollout=partial_rollout.message() if partial_rollout else None,
        )
        given = {"worker": self.name, "instance": self.instance, "lease_id": lease.lease_id, "failed": failed}
        kept = partial_rollout.digest if partial_rollout else ""
        async with self.history.call(self.name, "return", **given, partial_rollout=kept) as op:
            reply = await self.service.give_back(self.name, [returned])
            op.reply = {"outcome": tasks_pb2.ReturnOutcome.Name(reply.outcomes[0]).removeprefix("RETURN_OUTCOME_")}

    # ── what it does with a lease ────────────────────────────────────────────

    async def _work_on(self, lease: tasks_pb2.Lease) -> None:
        ways: list[tuple[float, Callable[[tasks_pb2.Lease], Coroutine[Any, Any, None]]]] = [
            (0.62, self._properly),
            (0.08, self._twice),
            (0.05, self._twice_with_other_bytes),
            (0.13, self._hand_back),
            (0.12, self._forget),
        ]
        if self.worker.calm():
            ways = ways[:1]
        ((_, way),) = self.rng.choices(ways, [weight for weight, _ in ways])
        await way(lease)

    async def _generate(self, lease: tasks_pb2.Lease, finish: int = groups_pb2.FINISH_REASON_STOP) -> Made:
        begun_with = self.worker.loaded
        await asyncio.sleep(self.rng.random() * GENERATION_S)
        versions = {*versions_of(lease.partial_rollout), begun_with, max(begun_with, self.worker.loaded)}
        return make(lease, sorted(versions), self.rng, worker_id=self.name, finish=finish)

    async def _properly(self, lease: tasks_pb2.Lease) -> None:
        made = await self._generate(lease)
        if self.rng.random() < 0.05:
            await self._meddle(lease)
        if self.rng.random() < 0.3 and not await self._extend(lease) and self.rng.random() < 0.5:
            return
        await self._push(made)

    async def _twice(self, lease: tasks_pb2.Lease) -> None:
        made = await self._generate(lease)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._push(made))
            tasks.create_task(self._push(made))

    async def _twice_with_other_bytes(self, lease: tasks_pb2.Lease) -> None:
        await self._push(await self._generate(lease))
        await self._push(await self._generate(lease))

    async def _hand_back(self, lease: tasks_pb2.Lease) -> None:
        partial_rollout = None
        if self.rng.random() < 0.7:
            partial_rollout = await self._generate(lease, groups_pb2.FINISH_REASON_ABORTED)
        await self._give_back(lease, failed=self.rng.random() < 0.3, partial_rollout=partial_rollout)

    async def _forget(self, lease: tasks_pb2.Lease) -> None:
        self.worker._forgotten.append(_Forgotten(lease, await self._generate(lease), time.monotonic()))

    async def _remember(self) -> None:
        """Some leases that expired meanwhile come to mind: to be extended, pushed or handed back, too late."""
        old = [it for it in self.worker._forgotten if time.monotonic() - it.since > LEASE_TTL_S]
        for it in old:
            self.worker._forgotten.remove(it)
            if self.rng.random() < 0.5:
                await self._extend(it.lease)
            if self.rng.random() < 0.7:
                await self._push(it.made)
            else:
                await self._give_back(it.lease, failed=False, partial_rollout=None)


def _names(reply: tasks_pb2.ExtendLeasesResponse) -> list[str]:
    return [tasks_pb2.LeaseState.Name(state).removeprefix("LEASE_STATE_") for state in reply.states]


def _lease_facts(lease: tasks_pb2.Lease) -> dict[str, object]:
    kept = (
        digest(lease.partial_rollout.header, lease.partial_rollout.payload) if lease.HasField("partial_rollout") else ""
    )
    return {
        "lease_id": lease.lease_id,
        "task_id": lease.task.task_id,
        "incarnation": lease.incarnation,
        "attempt": lease.attempt,
        "metadata": lease.task.metadata_json,
        "partial_rollout": kept,
    }
