"""The lease loop of one engine over a service that answers as a test says."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

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


@asynccontextmanager
async def leasing(service: StoppingService) -> AsyncIterator[EngineSlot]:
    """The service's dispatcher, for a simulated engine that is ready; its slot."""
    engine, asked = SimulatedEngine(), cast("Any", service)
    slot = EngineSlot("e0", engine, await engine.info(), base_model=None)
    slot.adopt(slot.loaded)
    # No lease is worked on, so the tools for it are not needed.
    tools: Any = SimpleNamespace(spread=None, surplus_samples=0)
    keeper, limit = LeaseKeeper("e0", asked), InflightLimit(slot, 2)
    service.dispatcher = Dispatcher(slot, asked, keeper, tools, limit=limit, lease_wait_s=10.0)
    yield slot
    await engine.close()


async def test_leases_that_come_in_the_moment_of_the_stop_go_back() -> None:
    service = StoppingService()
    async with leasing(service):
        await asyncio.wait_for(service.dispatcher.run(), 10)
    assert service.asked == ["r1", "r1"], "the same request, which grants the same"
    assert [(back.lease_id, back.kind) for back in service.returned] == [("t1/0/1", tasks_pb2.RETURN_KIND_INTERRUPTED)]


async def test_a_stop_in_the_moment_in_which_a_crowded_engine_is_looked_at_ends_the_loop() -> None:
    service = StoppingService()

    class Crowded:
        of_others, waiting = True, 9

        async def ask(self, _engine: object, _in_flight: int, *, max_age_s: float = 1.0) -> None:
            if max_age_s == 0.0:
                # Without a turn of the event loop in between: whoever runs the loop has not heard of it yet.
                service.dispatcher.stop()

        def is_crowded(self, _most: int) -> bool:
            return True

    async with leasing(service) as slot:
        slot.load = cast("Any", Crowded())
        running = asyncio.create_task(service.dispatcher.run())
        while not service.dispatcher.waiting_on:  # noqa: ASYNC110 - a turn of the loop each
            await asyncio.sleep(0)
        await asyncio.wait_for(running, 10)
    assert service.asked == []


async def test_engine_without_work_says_which_limit_it_waits_for() -> None:
    class Limited(StoppingService):
        async def lease(self, *_: Any, **__: Any) -> tasks_pb2.LeaseTasksResponse:
            self.asked.append("")
            if len(self.asked) == 2:
                self.dispatcher.stop()
            wait = tasks_pb2.LEASE_WAIT_RATE_LIMITED
            return tasks_pb2.LeaseTasksResponse(wait=wait, limited_environment="code", limited_for_ms=400)

    service = Limited()
    async with leasing(service):
        await asyncio.wait_for(service.dispatcher.run(), 10)
    expected = "time: starts_per_minute of environment code allow its next group in 0.4 s"
    assert service.dispatcher.waiting_on == expected
