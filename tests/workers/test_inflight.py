"""The limit of samples in flight that follows the use of a KV cache: where it comes to rest, and how it gets there."""

import asyncio
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from rollout_workers.engine.options import SimulatedOptions
from rollout_workers.engine.simulated.engine import SimulatedEngine, SimulatedEngineOptions
from rollout_workers.engine.simulated.hosts import SimulatedHost
from rollout_workers.engine.types import SampleRequest
from rollout_workers.slots import inflight, loads
from rollout_workers.slots.inflight import Aimd
from rollout_workers.worker import Worker
from tests.workers.building import eventually, length_reward, options, task
from tests.workers.fake_service import FakeService
from tests.workers.scripted import script_lengths
from tests.workers.working import working

TARGET, STEP, TOKENS = 0.9, 8, 40_000


class Loop:
    """Samples that grow by ten tokens between two looks, begun in groups of 8 as far as the limit lets them."""

    def __init__(self, aimd: Aimd, seed: int = 0) -> None:
        self.aimd = aimd
        self.rng = np.random.default_rng(seed)
        self.running: list[list[float]] = []
        self.limits: list[float] = []
        self.usages: list[float] = []

    def play(self, looks: int, mean: float) -> None:
        """Lengths are lognormal of this mean, σ 0.5."""
        for _ in range(looks):
            for sample in self.running:
                sample[0] += 10
            before = len(self.running)
            self.running = [sample for sample in self.running if sample[0] < sample[1]]
            ended = before - len(self.running)
            while len(self.running) + STEP <= self.aimd.limit:
                self.running += [
                    [0.0, float(mean * np.exp(0.5 * self.rng.standard_normal() - 0.125))] for _ in range(STEP)
                ]
            usage = sum(made for made, _ in self.running) / TOKENS
            self.aimd.observe(usage=usage, is_crowded=usage > 1, in_flight=len(self.running), ended=ended)
            self.limits.append(self.aimd.limit)
            self.usages.append(usage)


@pytest.mark.parametrize("seed", range(2))
def test_it_comes_to_rest_below_the_target_and_again_after_a_jump_of_lengths(seed: int) -> None:
    loop = Loop(Aimd(16, target=TARGET, step=STEP, most=1_000), seed)
    for mean in (400, 800, 400):
        loop.play(3_000, mean)
        # In a steady state the mean context is E[L²]/2E[L] = 0.64 of the mean.
        fitting = TARGET * TOKENS / (0.64 * mean)
        limits, usages = loop.limits[-1_500:], loop.usages[-1_500:]
        assert 0.75 * fitting < np.mean(limits) < 1.05 * fitting
        assert np.std(limits) < 0.16 * np.mean(limits), "it rests"
        assert np.mean(np.array(usages) > 1) < 0.03
        assert 0.7 < np.mean(usages) / TARGET < 1.02


def test_it_doubles_while_the_cache_is_half_empty_and_then_grows_by_a_group() -> None:
    aimd = Aimd(16, target=0.8, step=8, most=1_000)
    aimd.observe(usage=0.1, is_crowded=False, in_flight=16, ended=16)
    assert aimd.limit == 32
    aimd.observe(usage=0.5, is_crowded=False, in_flight=32, ended=32)
    assert aimd.limit == 40
    aimd.observe(usage=0.78, is_crowded=False, in_flight=40, ended=40)
    assert aimd.limit == 40, "it rests below the target"
    aimd.observe(usage=0.5, is_crowded=False, in_flight=8, ended=40)
    assert aimd.limit == 40, "it does not grow while something else keeps work away"


def test_it_falls_once_for_the_samples_that_are_in_flight_and_never_below_a_group() -> None:
    aimd = Aimd(100, target=0.8, step=8, most=1_000)
    aimd.observe(usage=0.85, is_crowded=False, in_flight=100, ended=0)
    assert aimd.limit == 90
    for ended in (50, 49):
        aimd.observe(usage=0.99, is_crowded=True, in_flight=90, ended=ended)
        assert aimd.limit == 90, "what it did has not shown yet"
    aimd.observe(usage=0.5, is_crowded=True, in_flight=80, ended=1)
    assert (aimd.limit, aimd.falls) == (72, 2), "requests that wait in the engine are a sign, too"
    for _ in range(40):
        aimd.observe(usage=1.0, is_crowded=True, in_flight=72, ended=72)
    assert aimd.limit == 8
    assert Aimd(500, target=0.8, step=8, most=64).limit == 64, "no more than the engine runs"


# ── the simulated engine's cache ─────────────────────────────────────────────


async def test_a_full_cache_sends_the_last_sample_away_and_lets_it_in_again(monkeypatch: pytest.MonkeyPatch) -> None:
    script_lengths(monkeypatch, lambda _: 200)
    engine = SimulatedEngine(SimulatedEngineOptions(tokens_per_s=500.0, kv_tokens=500))
    prompt = np.array([1, 2, 3], np.int32)
    requests = [SampleRequest(sample_index=i, input_ids=prompt, max_new_tokens=500) for i in range(6)]
    running = asyncio.create_task(engine.generate(requests))
    await eventually(lambda: engine.cache.retractions > 0)
    load = await engine.load()
    assert load.running + load.waiting == 6
    assert load.waiting >= 1
    assert load.token_usage > 0.5
    done = await asyncio.wait_for(running, 20)
    assert [len(sample.output_ids) for sample in done] == [200] * 6
    assert (engine.cache.usage, engine.cache.waiting) == (0, 0)


async def test_who_waits_for_room_in_the_cache_can_be_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    script_lengths(monkeypatch, lambda _: 2_000)
    engine = SimulatedEngine(SimulatedEngineOptions(tokens_per_s=1_000.0, kv_tokens=10))
    prompt = np.arange(8, dtype=np.int32)
    requests = [SampleRequest(sample_index=i, input_ids=prompt, max_new_tokens=5_000) for i in range(3)]
    running = asyncio.create_task(engine.generate(requests))
    await eventually(lambda: engine.cache.waiting == 2)
    await engine.abort([request.rid for request in requests])
    done = await asyncio.wait_for(running, 5)
    assert [sample.finish_reason for sample in done] == ["abort"] * 3
    assert [len(sample.output_ids) for sample in done[1:]] == [0, 0]


# ── a whole worker ───────────────────────────────────────────────────────────


async def test_a_worker_fills_the_cache_and_no_more(
    fake: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inflight, "POLL_S", 0.05)
    monkeypatch.setattr(loads, "FRESH_S", 0.02)
    script_lengths(monkeypatch, lambda _: 100)
    # Contexts of 53 tokens on average: 20 samples at nine tenths of it; a fixed limit of 32 groups would run 128.
    engine = SimulatedEngine(SimulatedEngineOptions(tokens_per_s=500.0, kv_tokens=1_200, slots=256))

    class Host(SimulatedHost):
        def __init__(self) -> None:
            self.engine = engine

    made = options(
        fake.address, tmp_path, simulated=SimulatedOptions(), lease_wait_s=0.2, groups_per_engine=1, kv_target=0.9
    )
    await fake.submit(*(task(f"t{i}", max_new_tokens=500) for i in range(400)))
    worker = Worker(made, reward=length_reward, hosts=[Host()])
    work = asyncio.create_task(worker.run())
    try:
        limits: list[int] = []
        running: list[int] = []
        deadline = asyncio.get_running_loop().time() + 30
        while asyncio.get_running_loop().time() < deadline and (len(fake.results()) < 60 or len(limits) < 40):
            await asyncio.sleep(0.05)
            if worker.slots and worker.slots[0].limit is not None:
                limits.append(worker.slots[0].limit.samples)
                running.append(worker.slots[0].in_flight)
        assert limits[0] in (0, 4)
        # From the first fall on. A limit may be more than what runs, for a while: the samples here end in step.
        fell = next(now for now, (before, after) in enumerate(pairwise(limits), 1) if after < before)
        assert 12 <= np.median(running[fell:]) <= 28
    finally:
        worker.stop()
        await asyncio.wait_for(work, 20)


async def test_reports_say_what_runs_what_may_and_how_full_the_cache_is(
    fake: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script_lengths(monkeypatch, lambda _: 100_000)
    await fake.submit(*(task(f"t{i}", max_new_tokens=200_000) for i in range(9)))
    async with working(fake, tmp_path, simulated=SimulatedOptions(slots=40), groups_per_engine=5) as running:
        await fake.until(lambda: sum(bool(leased.leased_to) for leased in fake.tasks.values()) == 5)
        slot = running.worker.slots[0]
        await eventually(lambda: slot.in_flight == 20)
        await slot.load.ask(slot.engine, slot.in_flight, max_age_s=0.0)
        report = slot.full_report("w")
        assert (report.running_samples, report.max_running_samples, report.kv_usage_milli) == (20, 20, 500)
