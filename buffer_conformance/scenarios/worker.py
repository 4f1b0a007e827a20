"""The scenarios for a worker. The kit is its trainer, and the trouble on its way to the service."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from uuid import uuid4

from buffer_conformance.child import service_at
from buffer_conformance.direct import Direct
from buffer_conformance.played.groups import made_group
from buffer_conformance.played.trainer import KitTrainer
from buffer_conformance.proxy import Proxy
from buffer_conformance.record import Record
from buffer_conformance.rules.groups import PUSHED_AGAIN_S
from buffer_conformance.rules.views import PUSHES, HeldLease, leases, reports
from buffer_conformance.rules.worker import EXIT_WITHIN_S, LOADED_WITHIN_S
from buffer_conformance.stage import Stage, Stuck, SuiteOptions
from buffer_wire.errors import RolloutBufferError
from rollout_buffer.v1 import common_pb2, tasks_pb2

_TASKS = 6
_LONG = 256
_PAUSED_S = 2.0
_HELD_TTLS = 1.4
_RIVAL: dict[str, Any] = {"worker_id": "conformance-rival", "instance_id": "kit"}


async def run_worker_suite(options: SuiteOptions) -> Record:
    """Run the candidate through all scenarios; the record of it. Raises DidNotStart, RolloutBufferError."""
    record, run_id = Record(), f"conformance-{uuid4().hex[:8]}"
    async with (
        service_at(options.service) as service,
        Proxy(service, record) as proxy,
        Direct(service, run_id) as direct,
    ):
        trainer = KitTrainer(direct, record, options.lease_ttl_s, options.weights)
        await trainer.begin()
        stage = Stage(options, proxy, run_id)
        suite = WorkerSuite(stage, direct, trainer)
        pulling = asyncio.create_task(trainer.run())
        try:
            await suite.run()
        finally:
            pulling.cancel()
            record.mark("end")
            if stage.child is not None:
                await stage.child.kill()
            with contextlib.suppress(RolloutBufferError):
                await direct.call("DeleteRun", trying_s=5.0)
        await asyncio.gather(pulling, return_exceptions=True)
        if not pulling.cancelled():
            pulling.result()
    return record


class WorkerSuite:
    """Scenarios that one candidate, a worker, is taken through."""

    def __init__(self, stage: Stage, direct: Direct, trainer: KitTrainer) -> None:
        self._stage = stage
        self._direct = direct
        self._trainer = trainer
        self._rival: tasks_pb2.Lease | None = None

    async def run(self) -> None:
        """Run all scenarios, one after the other."""
        await self._keep_one_lease()
        beating = asyncio.create_task(self._keep_rival_alive())
        try:
            await self._stage.start_candidate()
            for name, scenario in WORKER_SCENARIOS.items():
                async with self._stage.scenario(name) as wanted:
                    if wanted:
                        await scenario(self)
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)

    # ── scenarios ────────────────────────────────────────────────────────────

    async def plain(self) -> None:
        """Scenario: tasks, and no fault."""
        await self._work()

    async def lost_lease_reply(self) -> None:
        """Scenario: the reply that grants leases does not arrive."""
        fault = self._stage.proxy.faults.lose_reply("LeaseTasks", when=lambda reply: len(reply.leases) > 0)
        await self._work(fault_fires=lambda: self._stage.until_fired(fault, "a lease request that is granted"))

    async def lost_acknowledgement(self) -> None:
        """Scenario: a group is accepted, and its answer does not arrive."""
        fault = self._stage.proxy.faults.lose_reply(*PUSHES)
        await self._work(fault_fires=lambda: self._stage.until_fired(fault, "a push"))

    async def broken_push(self) -> None:
        """Scenario: a group does not arrive."""
        fault = self._stage.proxy.faults.break_call(*PUSHES)
        await self._work(fault_fires=lambda: self._stage.until_fired(fault, "a push"))

    async def away(self) -> None:
        """Scenario: the service cannot be reached for seconds."""
        ids = await self._trainer.submit(_TASKS)
        await self._stage.proxy.away(self._stage.options.away_s)
        await self._trained(ids)

    async def newer_weights(self) -> None:
        """Scenario: two versions are published while work goes on."""
        for _ in range(2):
            ids = await self._trainer.submit(_TASKS)
            await self._trainer.publish()
            wanted = self._stage.record.marked("published")[-1].data["version"]
            await self._look_for(wanted)
            await self._trained(ids)

    async def paused(self) -> None:
        """Scenario: an operator holds the run, and continues it."""
        await self._direct.call("PauseRun")
        await asyncio.sleep(_PAUSED_S)
        await self._direct.call("ContinueRun")
        await self._work()

    async def full_queue(self) -> None:
        """Scenario: pushes are held back for longer than a lease lives."""
        stage, began = self._stage, self._stage.record.now_s()
        stage.proxy.faults.hold(*PUSHES)
        ids = await self._trainer.submit(_TASKS)
        await stage.until(lambda: any(h.granted_s >= began for h in leases(stage.record).values()), "a lease")
        # Long enough that whoever sends no heartbeats loses its leases, and is seen to.
        await asyncio.sleep(_HELD_TTLS * stage.options.lease_ttl_s)
        stage.proxy.faults.release()
        await self._trained(ids)

    async def lost_lease(self) -> None:
        """Scenario: the task is finished by somebody else while the candidate holds it."""
        stage, rival, ttl_s = self._stage, self._rival, self._stage.options.lease_ttl_s
        if rival is None:
            raise Stuck("no lease of the kit's own")
        stage.proxy.faults.hold(*PUSHES)
        self._rival = None
        back = tasks_pb2.LeaseReturn(lease_id=rival.lease_id, kind=tasks_pb2.RETURN_KIND_INTERRUPTED)
        await self._direct.call("ReturnLeases", **_RIVAL, returns=[back])
        task_id = rival.task.task_id
        await stage.until(lambda: bool(self._leases_of(task_id)), f"a lease of task {task_id}")
        group = made_group(rival, common_pb2.WeightVersion(epoch=1, version=0))
        await self._direct.call("PushGroup", group=group)
        by = stage.record.now_s() + ttl_s
        await stage.until(
            lambda: any(held.ends for held in self._leases_of(task_id)) or stage.record.now_s() > by, "a heartbeat"
        )
        # Time for another heartbeat, which there should not be.
        await asyncio.sleep(ttl_s / 2)
        stage.proxy.faults.release()
        await self._trained([task_id])

    def _leases_of(self, task_id: str) -> list[HeldLease]:
        return [held for held in leases(self._stage.record).values() if held.lease.task.task_id == task_id]

    async def termination(self) -> None:
        """Scenario: SIGTERM while leases are held."""
        stage = self._stage
        stage.proxy.faults.hold(*PUSHES)
        began = stage.record.now_s()
        await self._trainer.submit(_TASKS, max_new_tokens=_LONG)
        await stage.until(lambda: any(h.granted_s >= began for h in leases(stage.record).values()), "a lease")
        asyncio.get_running_loop().call_later(1.0, stage.proxy.faults.release)
        await stage.end_candidate(EXIT_WITHIN_S, terminate=True)

    # ── parts ────────────────────────────────────────────────────────────────

    async def _work(self, fault_fires: Callable[[], Awaitable[None]] | None = None) -> None:
        ids = await self._trainer.submit(_TASKS)
        if fault_fires is not None:
            await fault_fires()
        await self._trained(ids)

    async def _trained(self, ids: list[str]) -> None:
        wanted, stage = set(ids), self._stage
        await stage.until(lambda: wanted <= self._trainer.trained, f"the groups of {len(ids)} tasks")
        # What the trainer has, the worker may not know of yet. Rules say what it should have done meanwhile.
        by = stage.record.now_s() + PUSHED_AGAIN_S + 1
        await stage.until(lambda: self._all_ended(wanted) or stage.record.now_s() > by, "the ends of all leases")

    def _all_ended(self, task_ids: set[str]) -> bool:
        found = leases(self._stage.record).values()
        return all(held.ends for held in found if held.lease.task.task_id in task_ids)

    async def _look_for(self, version: int) -> None:
        """Wait until the version is loaded, or for as long as that may take; a rule says whether it was in time."""
        stage = self._stage
        by = stage.record.now_s() + min(LOADED_WITHIN_S, stage.options.patience_s)
        await stage.until(
            lambda: self._loaded(version) or stage.record.now_s() > by,
            f"a report that version {version} is loaded",
            within_s=float("inf"),
        )

    def _loaded(self, version: int) -> bool:
        found = reports(self._stage.record).values()
        return bool(found) and all(said[-1][1].loaded.version >= version or said[-1][1].errors for said in found)

    async def _keep_one_lease(self) -> None:
        await self._trainer.submit(1)
        reply = await self._direct.call(
            "LeaseTasks",
            **_RIVAL,
            request_id="rival",
            engine_id="conformance-rival",
            loaded=common_pb2.WeightVersion(epoch=1),
            max_tasks=1,
            wait_ms=1_000,
        )
        self._rival = reply.leases[0]

    async def _keep_rival_alive(self) -> None:
        while self._rival is not None:
            await self._direct.call("ExtendLeases", **_RIVAL, lease_ids=[self._rival.lease_id])
            await asyncio.sleep(self._stage.options.lease_ttl_s / 4)


WORKER_SCENARIOS: Mapping[str, Callable[[WorkerSuite], Awaitable[None]]] = {
    "plain work": WorkerSuite.plain,
    "lost lease reply": WorkerSuite.lost_lease_reply,
    "lost acknowledgement": WorkerSuite.lost_acknowledgement,
    "broken push": WorkerSuite.broken_push,
    "service away": WorkerSuite.away,
    "newer weights": WorkerSuite.newer_weights,
    "paused run": WorkerSuite.paused,
    "full queue": WorkerSuite.full_queue,
    "lost lease": WorkerSuite.lost_lease,
    "termination": WorkerSuite.termination,
}
"""Scenarios by name, in the order in which they are run."""
