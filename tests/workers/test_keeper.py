import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rollout_workers.service.client import ServiceClient
from rollout_workers.tasks.keeper import LeaseEnd, LeaseKeeper
from tests.workers.building import eventually, lease, task, time_passes
from tests.workers.fake_service import FakeService, FakeTask

TTL_MS = 600


@asynccontextmanager
async def keeping(fake: FakeService) -> AsyncIterator[LeaseKeeper]:
    service = ServiceClient(fake.address, "r", instance_id="i", timeout_s=20)
    keeper = LeaseKeeper("w.e0", service)
    running = asyncio.create_task(keeper.run())
    yield keeper
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await service.close()


def held(fake: FakeService, task_id: str) -> object:
    fake.ttl_ms = TTL_MS
    of = task(task_id)
    fake.tasks[task_id] = FakeTask(of, attempt=1, leased_to="w.e0@i")
    return lease(of, ttl_ms=TTL_MS)


def never(_: LeaseEnd) -> None:
    raise AssertionError("the lease has not ended")


async def test_heartbeats_come_every_third_of_the_time_to_live(fake: FakeService) -> None:
    async with keeping(fake) as keeper:
        began = time.monotonic()
        keeper.hold(held(fake, "t1"), began, never)  # type: ignore[arg-type]
        await fake.until(lambda: len(fake.extends) >= 3)
        assert 0.55 < time.monotonic() - began < 10
        await eventually(lambda: keeper.expires_in_s("t1/0/1") > 0.4)
    assert fake.extends[0] == ["t1/0/1"]


async def test_time_to_live_counts_from_before_the_request(fake: FakeService) -> None:
    async with keeping(fake) as keeper:
        old = held(fake, "t1")
        old.ttl_ms = fake.ttl_ms = 60_000  # type: ignore[attr-defined]
        keeper.hold(old, time.monotonic() - 50, never)  # type: ignore[arg-type]
        assert keeper.expires_in_s("t1/0/1") <= 10
        # Due 30 s ago; counted from now, it would be due in 20 s.
        await fake.until(lambda: bool(fake.extends), timeout_s=10)


async def test_late_lease_is_extended_before_the_ones_that_were_there(fake: FakeService) -> None:
    async with keeping(fake) as keeper:
        fresh, late = held(fake, "fresh"), held(fake, "late")
        fake.ttl_ms = 60_000
        fresh.ttl_ms = late.ttl_ms = 60_000  # type: ignore[attr-defined]
        keeper.hold(fresh, time.monotonic() - 30, never)  # type: ignore[arg-type]
        await fake.until(lambda: len(fake.extends) == 1, timeout_s=5)
        # The next heartbeat of the first one is 20 s away.
        keeper.hold(late, time.monotonic() - 30, never)  # type: ignore[arg-type]
        await fake.until(lambda: len(fake.extends) == 2, timeout_s=5)


async def test_lost_lease_is_told_once_and_the_others_live_on(fake: FakeService) -> None:
    lost: list[str] = []
    async with keeping(fake) as keeper:
        keeper.hold(held(fake, "t1"), time.monotonic(), lambda end: lost.append(f"t1 {end}"))  # type: ignore[arg-type]
        keeper.hold(held(fake, "t2"), time.monotonic(), never)  # type: ignore[arg-type]
        fake.lost_leases.add("t1/0/1")
        await fake.until(lambda: len(fake.extends) >= 3)
    assert lost == ["t1 lost"]
    assert fake.extends[-1] == ["t2/0/1"]


async def test_cancelled_lease_is_told_apart_from_a_lost_one(fake: FakeService) -> None:
    ends: list[LeaseEnd] = []
    async with keeping(fake) as keeper:
        keeper.hold(held(fake, "t1"), time.monotonic(), ends.append)  # type: ignore[arg-type]
        fake.cancelled_leases.add("t1/0/1")
        await fake.until(lambda: bool(fake.extends))
        await eventually(lambda: len(keeper) == 0)
    assert ends == [LeaseEnd.CANCELLED]


async def test_hurried_heartbeat_does_not_wait_for_its_turn(fake: FakeService) -> None:
    async with keeping(fake) as keeper:
        lease_of = held(fake, "t1")
        lease_of.ttl_ms = fake.ttl_ms = 600_000  # type: ignore[attr-defined]
        keeper.hold(lease_of, time.monotonic(), never)  # type: ignore[arg-type]
        for beats in (1, 2):
            keeper.hurry()
            await fake.until(lambda beats=beats: len(fake.extends) == beats, timeout_s=5)
        await time_passes(0.4)
        assert len(fake.extends) == 2


async def test_released_lease_gets_no_heartbeat(fake: FakeService) -> None:
    async with keeping(fake) as keeper:
        keeper.hold(held(fake, "t1"), time.monotonic(), never)  # type: ignore[arg-type]
        keeper.hold(held(fake, "t2"), time.monotonic(), never)  # type: ignore[arg-type]
        keeper.release("t1/0/1")
        await fake.until(lambda: bool(fake.extends))
        assert keeper.expires_in_s("t1/0/1") < 0
    assert fake.extends[0] == ["t2/0/1"]


async def test_lease_outlives_a_service_that_is_away(fake: FakeService) -> None:
    async with keeping(fake) as keeper:
        keeper.hold(held(fake, "t1"), time.monotonic(), never)  # type: ignore[arg-type]
        await fake.until(lambda: bool(fake.extends))
        await fake.stop()
        await time_passes(2 * TTL_MS / 1000)
        assert len(keeper) == 1
        seen = len(fake.extends)
        await fake.start()
        await fake.until(lambda: len(fake.extends) > seen)
        assert len(keeper) == 1
