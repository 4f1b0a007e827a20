"""The scenarios for a worker. The kit is its trainer, and the trouble on its way to the service."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from buffer_conformance.direct import Direct
from buffer_conformance.faults import Fault, Faults
from buffer_conformance.played.groups import made_group
from buffer_conformance.played.trainer import KitTrainer
from buffer_conformance.record import Record
from buffer_conformance.rules.groups import PUSHED_AGAIN_S
from buffer_conformance.rules.views import PUSHES, HeldLease, leases, reports
from buffer_conformance.rules.worker import EXIT_WITHIN_S, LOADED_WITHIN_S
from buffer_conformance.stage import Stage, Stuck, SuiteOptions, beside, staged
from rollout_buffer.v1 import common_pb2, tasks_pb2

_TASKS = 6
_LONG = 256
_PAUSED_S = 2.0
_HELD_TTLS = 1.4
_RIVAL: dict[str, Any] = {"worker_id": "conformance-rival", "instance_id": "kit"}


async def run_worker_suite(options: SuiteOptions) -> Record:
    """Run the candidate through all scenarios; the record of it. Raises DidNotStart, RolloutBufferError."""
    async with staged(options) as (stage, direct):
        trainer = KitTrainer(direct, stage.record, options.lease_ttl_s, options.weights)
        await trainer.begin()
        async with beside(trainer.run()):
            await WorkerSuite(stage, direct, trainer).run()
    return stage.record


class WorkerSuite:
    """Scenarios that one candidate, a worker, is taken through."""

    def __init__(self, stage: Stage, direct: Direct, trainer: KitTrainer) -> None:
        self.stage = stage
        self._direct = direct
        self._trainer = trainer
        self._rival: tasks_pb2.Lease | None = None

    async def run(self) -> None:
        """Run all scenarios, one after the other."""
        await self._keep_one_lease()
        beating = asyncio.create_task(self._keep_rival_alive())
        try:
            await self.stage.start_candidate()
            for name, scenario in WORKER_SCENARIOS.items():
                async with self.stage.scenario(name) as wanted:
                    if wanted:
                        await scenario(self)
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)

    # ── scenarios ────────────────────────────────────────────────────────────

    async def work(self, fault: Fault | None = None, needs: str = "") -> None:
        """Scenario: tasks; the armed fault strikes once the candidate does what it needs."""
        ids = await self._trainer.submit(_TASKS)
        if fault is not None:
            await self.stage.until_fired(fault, needs)
        await self._trained(ids)

    async def away(self) -> None:
        """Scenario: the service cannot be reached for seconds."""
        ids = await self._trainer.submit(_TASKS)
        await self.stage.proxy.away(self.stage.options.away_s)
        await self._trained(ids)

    async def ended_streams(self) -> None:
        """Scenario: watch and push stream end in order while work goes on, and then a version is published."""
        began = self.stage.record.now_s()
        ids = await self._trainer.submit(_TASKS)
        await self.stage.until(lambda: any(h.granted_s >= began for h in leases(self.stage.record).values()), "a lease")
        self.stage.proxy.end_streams("WatchWeights", "PushGroups")
        await self._published()
        await self._trained(ids)

    async def newer_weights(self) -> None:
        """Scenario: two versions are published while work goes on."""
        for _ in range(2):
            ids = await self._trainer.submit(_TASKS)
            await self._published()
            await self._trained(ids)

    async def paused(self) -> None:
        """Scenario: an operator holds the run, and continues it."""
        await self._direct.call("PauseRun")
        await asyncio.sleep(_PAUSED_S)
        await self._direct.call("ContinueRun")
        await self.work()

    async def full_queue(self) -> None:
        """Scenario: pushes are held back for longer than a lease lives."""
        stage, began = self.stage, self.stage.record.now_s()
        stage.proxy.faults.hold(*PUSHES)
        ids = await self._trainer.submit(_TASKS)
        await stage.until(lambda: any(h.granted_s >= began for h in leases(stage.record).values()), "a lease")
        # Long enough that whoever sends no heartbeats loses its leases, and is seen to.
        await asyncio.sleep(_HELD_TTLS * stage.options.lease_ttl_s)
        stage.proxy.faults.release()
        await self._trained(ids)

    async def lost_lease(self) -> None:
        """Scenario: the task is finished by somebody else while the candidate holds it."""
        stage, rival, ttl_s = self.stage, self._rival, self.stage.options.lease_ttl_s
        if rival is None:
            raise Stuck("no lease of the kit's own")
        stage.proxy.faults.hold(*PUSHES)
        self._rival = None
        back = tasks_pb2.LeaseReturn(lease_id=rival.lease_id, kind=tasks_pb2.RETURN_KIND_INTERRUPTED)
        await self._direct.call("ReturnLeases", **_RIVAL, returns=[back])
        task_id = rival.task.task_id
        await stage.until(lambda: bool(self._leases_of(task_id)), f"a lease of task {task_id}")
        group = made_group(rival, common_pb2.WeightVersion(term=1, version=0))
        await self._direct.call("PushGroup", group=group)
        await stage.at_most(ttl_s, lambda: any(held.ends for held in self._leases_of(task_id)), "a heartbeat")
        # Time for another heartbeat, which there should not be.
        await asyncio.sleep(ttl_s / 2)
        stage.proxy.faults.release()
        await self._trained([task_id])

    def _leases_of(self, task_id: str) -> list[HeldLease]:
        return [held for held in leases(self.stage.record).values() if held.lease.task.task_id == task_id]

    async def termination(self) -> None:
        """Scenario: SIGTERM while leases are held."""
        stage = self.stage
        stage.proxy.faults.hold(*PUSHES)
        began = stage.record.now_s()
        await self._trainer.submit(_TASKS, max_new_tokens=_LONG)
        await stage.until(lambda: any(h.granted_s >= began for h in leases(stage.record).values()), "a lease")
        asyncio.get_running_loop().call_later(1.0, stage.proxy.faults.release)
        await stage.end_candidate(EXIT_WITHIN_S, terminate=True)

    # ── parts ────────────────────────────────────────────────────────────────

    async def _trained(self, ids: list[str]) -> None:
        wanted, stage = set(ids), self.stage
        await stage.until(lambda: wanted <= self._trainer.trained, f"the groups of {len(ids)} tasks")
        # What the trainer has, the worker may not know of yet. Rules say what it should have done meanwhile.
        await stage.at_most(PUSHED_AGAIN_S + 1, lambda: self._all_ended(wanted), "the ends of all leases")

    def _all_ended(self, task_ids: set[str]) -> bool:
        found = leases(self.stage.record).values()
        return all(held.ends for held in found if held.lease.task.task_id in task_ids)

    async def _published(self) -> None:
        """Publish a version and wait until it is loaded, or for as long as that may take; a rule says whether it was in
        time.
        """
        stage = self.stage
        await self._trainer.publish()
        version = stage.record.marked("published")[-1].data["version"]
        within_s = min(LOADED_WITHIN_S, stage.options.patience_s)
        await stage.at_most(within_s, lambda: self._loaded(version), f"a report that version {version} is loaded")

    def _loaded(self, version: int) -> bool:
        found = reports(self.stage.record).values()
        return bool(found) and all(said[-1][1].loaded.version >= version or said[-1][1].errors for said in found)

    async def _keep_one_lease(self) -> None:
        await self._trainer.submit(1)
        reply = await self._direct.call(
            "LeaseTasks",
            **_RIVAL,
            request_id="rival",
            engine_id="conformance-rival",
            loaded=common_pb2.WeightVersion(term=1),
            max_tasks=1,
            wait_ms=1_000,
        )
        self._rival = reply.leases[0]

    async def _keep_rival_alive(self) -> None:
        while self._rival is not None:
            await self._direct.call("ExtendLeases", **_RIVAL, lease_ids=[self._rival.lease_id])
            await asyncio.sleep(self.stage.options.lease_ttl_s / 4)


def _under(arm: Callable[[Faults], Fault], needs: str) -> Callable[[WorkerSuite], Awaitable[None]]:
    return lambda suite: suite.work(arm(suite.stage.proxy.faults), needs)


WORKER_SCENARIOS: Mapping[str, Callable[[WorkerSuite], Awaitable[None]]] = {
    "plain work": WorkerSuite.work,
    "lost lease reply": _under(
        lambda faults: faults.lose_reply("LeaseTasks", when=lambda reply: len(reply.leases) > 0),
        "a lease request that is granted",
    ),
    "lost acknowledgement": _under(lambda faults: faults.lose_reply(*PUSHES), "a push"),
    "broken push": _under(lambda faults: faults.break_call(*PUSHES), "a push"),
    "service away": WorkerSuite.away,
    "ended streams": WorkerSuite.ended_streams,
    "newer weights": WorkerSuite.newer_weights,
    "paused run": WorkerSuite.paused,
    "full queue": WorkerSuite.full_queue,
    "lost lease": WorkerSuite.lost_lease,
    "termination": WorkerSuite.termination,
}
"""Scenarios by name, in the order in which they are run."""
