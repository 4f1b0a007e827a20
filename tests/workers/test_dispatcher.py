"""The lease loop of one engine over a service that answers as a test says."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from rollout_buffer.v1 import tasks_pb2
from rollout_workers.engine.simulated.engine import SimulatedEngine
from rollout_workers.service.client import WaitLog
from rollout_workers.slots.inflight import InflightLimit
from rollout_workers.slots.slot import EngineSlot
from rollout_workers.tasks.dispatcher import Dispatcher
from rollout_workers.tasks.keeper import LeaseKeeper
from rollout_workers.versions import Version
from tests.workers.building import lease, task


class StoppingService:
    """Has the dispatcher stopped in the very moment in which it grants a lease."""

    address = "fake:1"
    dispatcher: Dispatcher

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.returned: list[tasks_pb2.LeaseReturn] = []

    def wait_log(self, what: str) -> WaitLog:
        return WaitLog(what)

    async def lease(
        self, holder: str, request_id: str, loaded: Version, *, max_tasks: int, wait_s: float, **_: Any
    ) -> tasks_pb2.LeaseTasksResponse:
        self.asked.append(request_id)
        self.dispatcher.stop()
        return tasks_pb2.LeaseTasksResponse(leases=[lease(task("t1"))])

    async def give_back(
        self, holder: str, returns: Sequence[tasks_pb2.LeaseReturn], **_: Any
    ) -> tasks_pb2.ReturnLeasesResponse:
        self.returned += returns
        return tasks_pb2.ReturnLeasesResponse(outcomes=[tasks_pb2.RETURN_OUTCOME_PENDING] * len(returns))


async def test_leases_that_come_in_the_moment_of_the_stop_go_back() -> None:
    engine = SimulatedEngine()
    slot = EngineSlot("e0", engine, await engine.info(), base_model=None)
    slot.adopt(slot.loaded)
    service: Any = StoppingService()
    keeper = LeaseKeeper("e0", service)
    # None of it is worked on, so the tools for it are not needed.
    tools: Any = SimpleNamespace(spread=None, surplus_samples=0)
    service.dispatcher = Dispatcher(slot, service, keeper, tools, limit=InflightLimit(slot, 2), lease_wait_s=10.0)
    await asyncio.wait_for(service.dispatcher.run(), 10)
    assert service.asked == ["r1", "r1"], "the same request, which grants the same"
    assert [(back.lease_id, back.kind) for back in service.returned] == [("t1/0/1", tasks_pb2.RETURN_KIND_INTERRUPTED)]
    await engine.close()


async def test_a_stop_in_the_moment_in_which_a_crowded_engine_is_looked_at_ends_the_loop() -> None:
    engine = SimulatedEngine()
    slot = EngineSlot("e0", engine, await engine.info(), base_model=None)
    slot.adopt(slot.loaded)
    service: Any = StoppingService()
    tools: Any = SimpleNamespace(spread=None, surplus_samples=0)
    keeper = LeaseKeeper("e0", service)
    dispatcher = Dispatcher(slot, service, keeper, tools, limit=InflightLimit(slot, 2), lease_wait_s=10.0)

    class Crowded:
        of_others, waiting = True, 9

        async def ask(self, _engine: object, _in_flight: int, *, max_age_s: float = 1.0) -> None:
            if max_age_s == 0.0:
                # Without a turn of the event loop in between: whoever runs the loop has not heard of it yet.
                dispatcher.stop()

        def is_crowded(self, _most: int) -> bool:
            return True

    load: Any = Crowded()
    slot.load = load
    running = asyncio.create_task(dispatcher.run())
    while not dispatcher.waiting_on:  # noqa: ASYNC110 - a turn of the loop each
        await asyncio.sleep(0)
    await asyncio.wait_for(running, 10)
    assert service.asked == []
    await engine.close()


async def test_engine_without_work_says_which_limit_it_waits_for() -> None:
    class Limited(StoppingService):
        async def lease(self, *_: Any, **__: Any) -> tasks_pb2.LeaseTasksResponse:
            self.asked.append("")
            if len(self.asked) == 2:
                self.dispatcher.stop()
            wait = tasks_pb2.LEASE_WAIT_RATE_LIMITED
            return tasks_pb2.LeaseTasksResponse(wait=wait, limited_environment="code", limited_for_ms=400)

    engine = SimulatedEngine()
    slot = EngineSlot("e0", engine, await engine.info(), base_model=None)
    slot.adopt(slot.loaded)
    service: Any = Limited()
    tools: Any = SimpleNamespace(spread=None, surplus_samples=0)
    keeper = LeaseKeeper("e0", service)
    service.dispatcher = Dispatcher(slot, service, keeper, tools, limit=InflightLimit(slot, 2), lease_wait_s=10.0)
    await asyncio.wait_for(service.dispatcher.run(), 10)
    expected = "time: starts_per_minute of environment code allow its next group in 0.4 s"
    assert service.dispatcher.waiting_on == expected
    await engine.close()
