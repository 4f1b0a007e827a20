"""Tests of which engines get work: the less loaded ask first, one where others wait gets none, one that fails call
after call is cut off until a trial succeeds.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from buffer_wire.connection.retry import Backoff
from rollout_buffer.v1 import weights_pb2
from rollout_workers.engine.errors import EngineRejected, EngineUnavailable
from rollout_workers.engine.options import SimulatedOptions
from rollout_workers.engine.simulated.engine import SimulatedEngine, SimulatedEngineOptions
from rollout_workers.engine.simulated.hosts import SimulatedHost
from rollout_workers.engine.types import EngineLoad, GeneratedSample, SampleRequest
from rollout_workers.slots import breaker, loads
from rollout_workers.slots.loads import LoadView
from rollout_workers.tasks import dispatcher
from rollout_workers.worker import Worker
from tests.workers.building import eventually, length_reward, options, task, time_passes
from tests.workers.fake_service import FakeService


class SharedEngine(SimulatedEngine):
    """A simulated engine with other users, and with calls that fail while it answers everything else."""

    def __init__(self, address: str, *, slots: int = 64) -> None:
        super().__init__(SimulatedEngineOptions(tokens_per_s=2_000.0, slots=slots), address=address)
        self.others = EngineLoad(running=0, waiting=0, token_usage=0.0)
        self.load_asked = asyncio.Event()
        self.answers_after: asyncio.Event | None = None
        self.load_takes_s = 0.0
        self.refuses = False
        self.calls = 0

    async def load(self) -> EngineLoad:
        self.load_asked.set()
        if self.answers_after is not None:
            await self.answers_after.wait()
        await asyncio.sleep(self.load_takes_s)
        own = await super().load()
        return EngineLoad(
            running=own.running + self.others.running,
            waiting=own.waiting + self.others.waiting,
            token_usage=own.token_usage,
        )

    async def generate(
        self, requests: Sequence[SampleRequest], *, deadline_s: float | None = None
    ) -> list[GeneratedSample]:
        self.calls += 1
        if self.refuses:
            raise EngineRejected(self._address, "generating", 500, "an internal error")
        return await super().generate(requests, deadline_s=deadline_s)


class Host(SimulatedHost):
    def __init__(self, engine: SharedEngine) -> None:
        self.engine = engine


@asynccontextmanager
async def working(fake: FakeService, tmp_path: Path, *engines: SharedEngine, **more: Any) -> AsyncIterator[Worker]:
    made = options(fake.address, tmp_path, simulated=SimulatedOptions(engines=len(engines)), lease_wait_s=0.2, **more)
    worker = Worker(made, reward=length_reward, hosts=[Host(engine) for engine in engines])
    running = asyncio.create_task(worker.run())
    try:
        async with asyncio.timeout(60):
            yield worker
            worker.stop()
            await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "_CROWDED", Backoff(first_s=0.02, ceiling_s=0.02))
    monkeypatch.setattr(loads, "FRESH_S", 0.02)
    monkeypatch.setattr(breaker, "_PAUSES", Backoff(first_s=0.1, ceiling_s=0.2))


async def test_an_engine_where_others_wait_gets_no_lease_until_they_are_done(fake: FakeService, tmp_path: Path) -> None:
    busy, free = SharedEngine("simulated://busy"), SharedEngine("simulated://free")
    busy.others = EngineLoad(running=64, waiting=7, token_usage=1.0)
    async with working(fake, tmp_path, busy, free) as worker:
        await fake.submit(*(task(f"t{i}") for i in range(10)))
        await fake.until(lambda: len(fake.results()) == 10)
        assert (busy.calls, {request.engine_id for request in fake.lease_requests}) == (0, {"w.e1"})
        assert "7 requests wait in it" in worker._seats.dispatchers[0].waiting_on
        busy.others = EngineLoad(running=3, waiting=0, token_usage=0.1)
        await fake.until(lambda: any(request.engine_id == "w.e0" for request in fake.lease_requests))


async def test_requests_of_the_worker_itself_hold_nothing_up(fake: FakeService, tmp_path: Path) -> None:
    engine = SharedEngine("simulated://0", slots=2)
    async with working(fake, tmp_path, engine, groups_per_engine=32):
        await fake.submit(*(task(f"t{i}") for i in range(64)))
        await fake.until(lambda: len(fake.results()) == 64)


async def test_the_less_loaded_engine_asks_first(
    fake: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Room for a slow machine: it is the order that counts.
    monkeypatch.setattr(dispatcher, "_HEAD_START_S", 5.0)
    free, busy = SharedEngine("simulated://free"), SharedEngine("simulated://busy")
    # Both are about to ask; the free one would come too late by itself, for its answer takes a moment.
    busy.answers_after = free.load_asked
    free.load_takes_s = 0.02
    busy.others = EngineLoad(running=40, waiting=0, token_usage=0.5)
    async with working(fake, tmp_path, free, busy):
        await fake.until(lambda: {request.engine_id for request in fake.lease_requests} == {"w.e0", "w.e1"})
        assert fake.lease_requests[0].engine_id == "w.e0"


@pytest.mark.parametrize(
    ("running", "waiting", "own", "crowded"),
    [(8, 0, 8, False), (32, 0, 0, False), (32, 5, 0, True), (32, 32, 64, False), (32, 40, 64, True), (4, 4, 8, False)],
)
async def test_only_waiting_that_others_cause_counts(running: int, waiting: int, own: int, *, crowded: bool) -> None:
    engine = SharedEngine("simulated://0")
    engine.others = EngineLoad(running=running, waiting=waiting, token_usage=0.0)
    view = LoadView()
    await view.ask(engine, own)
    assert view.is_crowded(32) is crowded
    assert view.requests(own) == running + waiting


async def test_an_engine_that_does_not_tell_its_load_is_taken_to_serve_nobody_else() -> None:
    engine = SharedEngine("simulated://0")
    await engine.die()
    view = LoadView()
    await view.ask(engine, 5)
    assert (view.of_others, view.requests(5), view.is_crowded(1)) == (0, 5, False)


async def test_an_engine_that_fails_call_after_call_is_cut_off_and_tried_again(
    fake: FakeService, tmp_path: Path
) -> None:
    broken, sound = SharedEngine("simulated://broken"), SharedEngine("simulated://sound")
    broken.refuses = True
    fake.retry_failed = True
    with structlog.testing.capture_logs() as logs:
        async with working(fake, tmp_path, broken, sound, breaker_failures=3, progress_every_s=0.05) as worker:
            await eventually(lambda: bool(worker.slots))
            slot = worker.slots[0]
            await fake.submit(*(task(f"t{i}", group_size=1) for i in range(20)))
            await eventually(lambda: slot.breaker.is_open)
            await fake.until(lambda: len(fake.results()) == 20)
            # Everything was finished by the other one, and trials alone reach the broken one.
            calls = broken.calls
            await eventually(lambda: broken.calls > calls + 1)
            assert slot.breaker.is_open
            assert any("failed calls in a row, the last" in report.last_error for report in fake.reports)
            await eventually(lambda: any("circuit open" in str(line.get("loaded")) for line in logs))
            broken.refuses = False
            await eventually(lambda: not slot.breaker.is_open)
            assert slot.leasable
    assert [line["event"] for line in logs if line["event"].startswith("circuit")] == ["circuit open", "circuit closed"]
    assert not any(report.state == weights_pb2.ENGINE_STATE_QUARANTINED for report in fake.reports)


async def test_a_simulated_engine_that_dies_leaves_what_it_had_made() -> None:
    engine = SimulatedEngine(SimulatedEngineOptions(tokens_per_s=200.0))
    request = SampleRequest(sample_index=0, input_ids=np.array([1], np.int32), max_new_tokens=100_000, ignore_eos=True)
    running = asyncio.create_task(engine.generate([request]))
    await eventually(lambda: bool(engine._decoding))
    await time_passes(0.1)
    await engine.die()
    with pytest.raises(EngineUnavailable) as raised:
        await running
    (sample,) = raised.value.partial
    assert 0 < len(sample.output_ids) == len(sample.logprobs)
    assert sample.spans[-1].end == len(sample.output_ids)
