"""The whole worker over simulated engines against a fake of the service, named so: the rules of the real one are tested
with the real one."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import structlog

from buffer_wire.layout import read_payload
from rollout_buffer.v1 import tasks_pb2, weights_pb2
from rollout_workers.engine.options import SimulatedOptions
from rollout_workers.rewards import RewardInput
from tests.workers.building import task, time_passes, weight_files
from tests.workers.fake_service import FakeService
from tests.workers.working import all_done, working


async def test_tasks_become_scored_groups(fake: FakeService, tmp_path: Path) -> None:
    await fake.submit(*(task(f"t{i}", metadata_json='{"i": 1}', environment="sums") for i in range(30)))
    async with working(fake, tmp_path) as running:
        await fake.until(all_done(fake))
    for task_id, group in fake.results().items():
        assert len(group.header.samples) == 4
        for sample, ids in zip(group.header.samples, fake.tokens(task_id), strict=True):
            assert ids[:3] == [1, 2, 3]
            assert sample.reward == len(ids) - 3
            assert sample.spans[0].version.version == 0
        assert group.header.metadata_json == '{"i": 1}'
        logprobs = read_payload(group.header, group.payload)["logprobs"]
        mask = read_payload(group.header, group.payload)["loss_mask"]
        assert np.all((logprobs == 0) | (mask == 1))
    assert fake.returns == []
    counters = running.worker.counters
    assert (counters.pushed["queued"], counters.samples, counters.leases) == (30, 120, 30)


async def test_every_engine_leases_for_itself_up_to_its_concurrency(fake: FakeService, tmp_path: Path) -> None:
    await fake.submit(*(task(f"t{i}", max_new_tokens=10_000) for i in range(10)))
    simulated = SimulatedOptions(engines=2, tokens_per_s=50.0, length_median=1_000.0, length_sigma=0.0)
    async with working(fake, tmp_path, simulated=simulated, groups_per_engine=3):
        await fake.until(lambda: sum(bool(t.leased_to) for t in fake.tasks.values()) == 6)
        await time_passes(0.3)
        holders = [t.leased_to.split("@")[0] for t in fake.tasks.values() if t.leased_to]
        assert sorted(holders) == ["w.e0"] * 3 + ["w.e1"] * 3
    assert {request.engine_id for request in fake.lease_requests} == {"w.e0", "w.e1"}


async def test_slow_rewards_do_not_idle_the_engine(fake: FakeService, tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def reward(sample: RewardInput) -> float:
        await gate.wait()
        return 1.0

    await fake.submit(*(task(f"t{i}") for i in range(20)))
    async with working(fake, tmp_path, reward=reward, groups_per_engine=2):
        # Two on the engine, and four times as many held in all.
        await fake.until(lambda: sum(bool(t.leased_to) for t in fake.tasks.values()) == 8)
        gate.set()
        await fake.until(all_done(fake))


async def test_weights_are_loaded_in_flight(fake: FakeService, tmp_path: Path) -> None:
    await fake.submit(*(task(f"t{i}", max_new_tokens=400) for i in range(8)))
    simulated = SimulatedOptions(tokens_per_s=200.0, length_median=300.0, length_sigma=0.0)
    async with working(fake, tmp_path, simulated=simulated) as running:
        await fake.until(lambda: sum(bool(t.leased_to) for t in fake.tasks.values()) == 8)
        for version in (1, 2):
            await time_passes(0.3)
            files = weight_files(tmp_path / f"v{version}", {"model": b"%d" % version})
            await fake.publish(1, version, weights_pb2.WeightManifest(files=files))
            await fake.until(
                lambda version=version: any(
                    r.loaded.version == version and r.state == weights_pb2.ENGINE_STATE_READY for r in fake.reports
                )
            )
        await fake.until(all_done(fake))
        assert running.worker.slots[0].reloads == 2
    for group in fake.results().values():
        for sample in group.header.samples:
            assert [span.version.version for span in sample.spans] == [0, 1, 2]
    assert fake.reports[-1].state == weights_pb2.ENGINE_STATE_STOPPED


async def test_pause_that_aborts_resumes_the_partial_samples(fake: FakeService, tmp_path: Path) -> None:
    await fake.submit(task("t1", max_new_tokens=400))
    simulated = SimulatedOptions(tokens_per_s=200.0, length_median=200.0, length_sigma=0.0)
    async with working(fake, tmp_path, simulated=simulated, pause_mode="abort"):
        await fake.until(lambda: bool(fake.tasks["t1"].leased_to))
        await time_passes(0.3)
        files = weight_files(tmp_path / "v1", {"model": b"1"})
        await fake.publish(1, 1, weights_pb2.WeightManifest(files=files))
        await fake.until(all_done(fake))
    assert [[s.version.version for s in sample.spans] for sample in fake.results()["t1"].header.samples] == [[0, 1]] * 4
    assert fake.returns == []


async def test_idle_worker_waits_politely_while_the_run_drains(
    fake: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_workers.tasks.dispatcher._AFTER_HELD_ANSWER_S", 0.1)
    fake.wait, fake.holds = tasks_pb2.LEASE_WAIT_DRAINING, False
    with structlog.testing.capture_logs() as logs:
        async with working(fake, tmp_path) as running:
            await fake.until(lambda: bool(fake.lease_requests))
            # From now on, for the start itself may take longer.
            monkeypatch.setattr("rollout_workers.tasks.dispatcher._WARN_AFTER_S", 0.1)
            await fake.until(lambda: len(fake.lease_requests) >= 5)
            assert "being drained" in running.worker._seats.dispatchers[0].waiting_on
            # Continued: there is work again.
            await fake.submit(task("t1"))
            await fake.until(all_done(fake))
            assert running.worker.counters.last_error == ""
    assert not [line for line in logs if line["log_level"] in ("warning", "error")]


async def test_idle_engine_says_on_whom_it_waits(
    fake: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_workers.tasks.dispatcher._WARN_AFTER_S", 0.2)
    with structlog.testing.capture_logs() as logs:
        async with working(fake, tmp_path, lease_wait_s=0.1, progress_every_s=0.2) as running:
            await fake.until(lambda: len(fake.lease_requests) >= 6)
            assert running.worker.counters.last_error == ""
    idle = [line for line in logs if line["event"] == "no work"]
    assert idle
    assert all(line["waiting_on"] == "the trainer's feeder: no task is pending" for line in idle)
    progress = [line for line in logs if line["event"] == "progress"]
    assert progress
    assert progress[-1]["loaded"] == "1.0"
    assert "the trainer's feeder" in progress[-1]["waiting_on"]


async def test_engine_is_reported_from_its_start_to_its_end(fake: FakeService, tmp_path: Path) -> None:
    async with working(fake, tmp_path) as running:
        await fake.until(lambda: any(r.state == weights_pb2.ENGINE_STATE_READY for r in fake.reports))
        running.engine.fail_next_loads(1)
        files = weight_files(tmp_path / "v1", {"model": b"1"})
        await fake.publish(1, 1, weights_pb2.WeightManifest(files=files))
        await fake.until(lambda: fake.reports[-1].reloads == 1)
    last = fake.reports[-1]
    assert (last.engine_id, last.worker_id, last.loaded.version, last.errors) == ("w.e0", "w", 1, 1)
    assert "a fault was injected" in last.last_error
    assert last.last_reload_ms > 0
    assert last.state == weights_pb2.ENGINE_STATE_STOPPED
