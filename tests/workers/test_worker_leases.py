"""A worker's leases against a fake of the service: granted twice, kept through an outage, lost and cancelled."""

import asyncio
from pathlib import Path

import pytest

from rollout_buffer.v1 import tasks_pb2, weights_pb2
from rollout_workers.engine.options import SimulatedOptions
from rollout_workers.rewards import RewardInput
from tests.workers.building import eventually, task, time_passes, weight_files
from tests.workers.fake_service import FakeService
from tests.workers.working import SLOW, all_done, given_back, working


async def test_lost_lease_reply_grants_the_same_leases(fake: FakeService, tmp_path: Path) -> None:
    fake.lose_lease_replies = 2
    await fake.submit(*(task(f"t{i}") for i in range(5)))
    async with working(fake, tmp_path):
        await fake.until(all_done(fake))
    assert {t.attempt for t in fake.tasks.values()} == {1}
    assert len({request.request_id for request in fake.lease_requests[:3]}) == 1


async def test_killed_service_that_comes_back_loses_nothing(fake: FakeService, tmp_path: Path) -> None:
    await fake.submit(*(task(f"t{i}", max_new_tokens=40) for i in range(40)))
    simulated = SimulatedOptions(tokens_per_s=100.0, length_median=30.0)
    async with working(fake, tmp_path, simulated=simulated) as running:
        for done in (5, 15, 25):
            await fake.until(lambda done=done: len(fake.results()) >= done)
            await fake.stop()
            await time_passes(0.3)
            await fake.start()
        await fake.until(all_done(fake))
        assert not running.running.done()
    assert given_back(fake, tasks_pb2.RETURN_KIND_FAILED) == []


async def test_lost_lease_stops_its_generation(fake: FakeService, tmp_path: Path) -> None:
    fake.ttl_ms = 300
    await fake.submit(task("t1", max_new_tokens=5_000))
    async with working(fake, tmp_path, simulated=SLOW, groups_per_engine=1) as running:
        await fake.until(lambda: bool(fake.extends))
        fake.lost_leases.add("t1/0/1")
        await fake.submit(task("t2", max_new_tokens=4))
        await fake.until(lambda: "t2" in fake.results())
        assert set(running.engine._decoding) == set()
        assert running.worker.counters.leases_lost == 1
    assert fake.returns == []


async def test_an_engine_that_was_too_old_asks_again_as_soon_as_it_has_loaded(
    fake: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long enough that a request within the test cannot come of it.
    monkeypatch.setattr("rollout_workers.tasks.dispatcher._AFTER_QUICK_ANSWER_S", 600.0)
    fake.holds, fake.wait = False, tasks_pb2.LEASE_WAIT_ENGINE_STALE
    async with working(fake, tmp_path):
        await fake.until(lambda: bool(fake.lease_requests))
        files = weight_files(tmp_path / "v1", {"model": b"1"})
        await fake.publish(1, 1, weights_pb2.WeightManifest(files=files))
        await fake.until(lambda: fake.lease_requests[-1].loaded.version == 1)


async def test_cancelled_lease_stops_its_generation_soon_after_the_publish(fake: FakeService, tmp_path: Path) -> None:
    fake.ttl_ms = 600_000
    await fake.submit(task("t1", max_new_tokens=5_000))
    async with working(fake, tmp_path, simulated=SLOW, groups_per_engine=1) as running:
        await eventually(lambda: bool(running.engine._decoding))
        fake.cancelled_leases.add("t1/0/1")
        await fake.submit(task("t2", max_new_tokens=4))
        # The next regular heartbeat is minutes away.
        files = weight_files(tmp_path / "v1", {"model": b"1"})
        await fake.publish(1, 1, weights_pb2.WeightManifest(files=files))
        await fake.until(lambda: "t2" in fake.results())
        assert set(running.engine._decoding) == set()
        counters = running.worker.counters
        assert (counters.leases_cancelled, counters.leases_lost) == (1, 0)
    assert fake.returns == []
    assert "t1" not in fake.results()


@pytest.mark.parametrize(("end", "pushed"), [("cancelled", False), ("lost", True)])
async def test_group_that_is_being_scored_is_pushed_unless_its_lease_was_cancelled(
    fake: FakeService, tmp_path: Path, end: str, pushed: bool
) -> None:
    scoring, release = asyncio.Event(), asyncio.Event()

    async def reward(sample: RewardInput) -> float:
        if sample.task_id == "t1":
            scoring.set()
            await release.wait()
        return 1.0

    fake.ttl_ms = 300
    await fake.submit(task("t1"))
    async with working(fake, tmp_path, reward=reward) as running:
        await scoring.wait()
        (fake.cancelled_leases if end == "cancelled" else fake.lost_leases).add("t1/0/1")
        seen = len(fake.extends)
        await fake.until(lambda: len(fake.extends) > seen)
        await fake.submit(task("t2"))
        await fake.until(lambda: "t2" in fake.results())
        release.set()
        if pushed:
            await fake.until(lambda: "t1" in fake.results())
        assert running.worker.counters.leases_cancelled == (0 if pushed else 1)
    assert ("t1" in fake.results()) == pushed
    assert fake.returns == []
