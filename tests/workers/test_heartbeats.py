"""Heartbeats of a worker: leases and reports of the same time go in one call, and each is answered for itself."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from buffer_wire.errors import InvalidField
from buffer_wire.limits import MAX_ERROR_CHARS
from rollout_buffer.v1 import tasks_pb2, weights_pb2
from rollout_workers.engine.simulated.engine import SimulatedEngine, SimulatedEngineOptions
from rollout_workers.fleet.reporter import REFRESH_S, Reporter
from rollout_workers.service import heartbeats
from rollout_workers.service.client import ServiceClient
from rollout_workers.slots.slot import EngineSlot
from rollout_workers.tasks.keeper import LeaseEnd, LeaseKeeper
from rollout_workers.weights.permits import Permits
from rollout_workers.weights.watcher import WeightWatcher
from tests.workers.building import lease, task
from tests.workers.fake_service import FakeService, FakeTask


@asynccontextmanager
async def calling(fake: FakeService) -> AsyncIterator[ServiceClient]:
    service = ServiceClient(fake.address, "r", instance_id="i", timeout_s=20)
    async with asyncio.timeout(30):
        yield service
    await service.close()


def report(engine_id: str, error: str = "") -> weights_pb2.EngineReport:
    return weights_pb2.EngineReport(
        engine_id=engine_id, worker_id="w", state=weights_pb2.ENGINE_STATE_READY, last_error=error
    )


def leased(fake: FakeService, task_id: str, holder: str) -> tasks_pb2.Lease:
    of = task(task_id)
    fake.tasks[task_id] = FakeTask(of, attempt=1, leased_to=f"{holder}@i")
    return lease(of, ttl_ms=60_000)


async def test_what_is_said_at_once_goes_in_one_call_and_each_has_its_answer(fake: FakeService) -> None:
    kept, lost = leased(fake, "t1", "w.e0"), leased(fake, "t2", "w.e1")
    fake.lost_leases.add(lost.lease_id)
    async with calling(fake) as service:
        first, second, *reported = await asyncio.gather(
            service.extend("w.e0", [kept.lease_id], timeout_s=5),
            service.extend("w.e1", [lost.lease_id], timeout_s=5),
            service.report(report("w.e0")),
            service.report(report("w.e1")),
        )
        assert service.ref().seen_revision == fake.revision
    assert (list(first.states), list(second.states)) == ([tasks_pb2.LEASE_STATE_LIVE], [tasks_pb2.LEASE_STATE_LOST])
    assert [each.may_load for each in reported] == [True, True]
    assert set(fake.engines) == {"w.e0", "w.e1"}
    assert fake.heartbeats == 1


async def test_what_is_said_alone_goes_by_its_own_call(fake: FakeService) -> None:
    async with calling(fake) as service:
        await service.report(report("w.e0"))
        await service.report(report("w.e0"))
    assert (len(fake.reports), fake.heartbeats) == (2, 0)


async def test_a_service_of_before_is_called_as_before(fake: FakeService) -> None:
    fake.knows_heartbeats = False
    held = leased(fake, "t1", "w.e0")
    async with calling(fake) as service:
        for _ in range(2):
            extended, _ = await asyncio.gather(
                service.extend("w.e0", [held.lease_id], timeout_s=5), service.report(report("w.e0"))
            )
            assert list(extended.states) == [tasks_pb2.LEASE_STATE_LIVE]
    assert (len(fake.extends), len(fake.reports)) == (2, 2)


async def test_a_wrong_part_fails_no_other(fake: FakeService) -> None:
    held = leased(fake, "t1", "w.e0")
    async with calling(fake) as service:
        extended, refused = await asyncio.gather(
            service.extend("w.e0", [held.lease_id], timeout_s=5),
            service.report(report("w.e0", "x" * (MAX_ERROR_CHARS + 1))),
            return_exceptions=True,
        )
    assert isinstance(extended, tasks_pb2.ExtendLeasesResponse)
    assert isinstance(refused, InvalidField)


async def test_leases_of_all_engines_ride_on_the_first_heartbeat(
    fake: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(_: LeaseEnd) -> None:
        pytest.fail("the lease has not ended")

    monkeypatch.setattr(heartbeats, "GATHER_S", 0.2)  # However slow the machine is.
    fake.ttl_ms = 60_000
    async with calling(fake) as service, asyncio.TaskGroup() as tasks:
        keepers = [LeaseKeeper(f"w.e{i}", service) for i in range(3)]
        runs = [tasks.create_task(keeper.run()) for keeper in keepers]
        # Due now, in 8 s, and in 19 s: the last one is too young to ride.
        for keeper, age_s in zip(keepers, (20.0, 12.0, 1.0), strict=True):
            held = leased(fake, f"t{age_s:.0f}", keeper._holder)
            keeper.hold(held, time.monotonic() - age_s, never)
        await fake.until(lambda: len(fake.extends) == 2, timeout_s=5)
        assert fake.heartbeats == 1
        for run in runs:
            run.cancel()
    assert sorted(fake.extends) == [["t12/0/1"], ["t20/0/1"]]


async def test_a_report_rides_on_a_heartbeat_when_half_of_its_time_is_over(
    fake: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "GATHER_S", 0.2)  # However slow the machine is.
    held = leased(fake, "t1", "w.e0")
    engine = SimulatedEngine(SimulatedEngineOptions(version_label="1.0"))
    slot = EngineSlot("w.e0", engine, await engine.info(), base_model=None)
    async with calling(fake) as service, asyncio.TaskGroup() as tasks:
        watcher = WeightWatcher(service)
        reporter = Reporter(slot, service, watcher, Permits(slot, watcher, unlimited=True), "w")
        running = tasks.create_task(reporter.run())
        await fake.until(lambda: len(fake.reports) == 1)
        # It is too soon after the first report; then it is as if half of the time had passed.
        await service.extend("w.e0", [held.lease_id], timeout_s=5)
        assert (len(fake.reports), fake.heartbeats) == (1, 0)
        reporter._sent_at -= REFRESH_S * 0.6
        await service.extend("w.e0", [held.lease_id], timeout_s=5)
        assert (len(fake.reports), fake.heartbeats) == (2, 1)
        running.cancel()


async def test_who_waits_when_it_is_closed_waits_no_longer(fake: FakeService) -> None:
    async with calling(fake) as service:
        said = asyncio.ensure_future(service.report(report("w.e0")))
        await asyncio.sleep(0)
        assert service.heartbeats._parts
        service.heartbeats.close()
        await asyncio.wait([said], timeout=5)
        assert said.cancelled()
        # What is said afterwards is said.
        await service.report(report("w.e0"))
    assert len(fake.reports) == 1


async def test_a_service_of_before_that_asks_for_tokens_is_asked_once(fake: FakeService) -> None:
    fake.knows_heartbeats = False
    fake.refuses_what_it_does_not_know = True
    async with calling(fake) as service:
        for _ in range(2):
            await asyncio.gather(service.report(report("w.e0")), service.report(report("w.e1")))
    assert (len(fake.reports), fake.heartbeats_refused) == (4, 1)
