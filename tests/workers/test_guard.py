"""EngineGuard with a host as a test scripts it: how often and how soon an engine is started anew."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from buffer_wire.connection.retry import Backoff
from rollout_workers.engine.errors import EngineNotStarted, EngineUnavailable
from rollout_workers.engine.simulated.engine import SimulatedEngine
from rollout_workers.engine.types import Engine, SampleRequest
from rollout_workers.errors import EnginesLost
from rollout_workers.fleet import guard
from rollout_workers.fleet.guard import EngineGuard
from rollout_workers.slots.engine_state import Event
from rollout_workers.slots.slot import EngineSlot
from tests.workers.building import eventually


class Host:
    """Owner of a process that is started anew after `failures` attempts that fail."""

    base_model: str | None = None

    def __init__(self) -> None:
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.engine = SimulatedEngine()
        self.ended = False
        self.why_ended = "its process ended with exit code -9; the end of e0.log:\nout of memory"
        self.failures = 0
        self.attempts: list[float] = []

    async def open(self) -> Engine:
        return self.engine

    async def revive(self) -> Engine:
        await self.may_start.wait()
        self.attempts.append(asyncio.get_running_loop().time())
        if self.failures:
            self.failures -= 1
            raise EngineNotStarted("e0", "the server ended with exit code 1", "e0.log", "no such model")
        await self.engine.revive()
        self.ended = False
        return self.engine

    async def close(self) -> None: ...


@asynccontextmanager
async def guarded(host: Host, *, timeout_s: float = 60.0) -> AsyncIterator[EngineSlot]:
    slot = EngineSlot("e0", host.engine, await host.engine.info(), base_model=None)
    await slot.refresh()
    slot.adopt(slot.loaded)
    running = asyncio.create_task(EngineGuard(slot, host, [slot], timeout_s=timeout_s).run())
    try:
        async with asyncio.timeout(30):
            yield slot
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def lose(slot: EngineSlot, host: Host) -> None:
    host.ended = True
    slot.move(Event.SUSPECTED)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_BACKOFF", Backoff(first_s=0.01, ceiling_s=0.02))
    monkeypatch.setattr(guard, "_SHORT_LIVES", Backoff(first_s=0.1, ceiling_s=10.0))


async def test_a_process_that_ended_is_started_until_it_comes_and_then_loaded_before_work() -> None:
    host = Host()
    async with guarded(host) as slot:
        assert slot.leasable
        host.failures = 3
        lose(slot, host)
        await eventually(lambda: len(host.attempts) == 4 and slot.reachable)
        # Until the loader has brought it to the published version.
        assert (slot.current, slot.leasable) == (False, False)


async def test_the_end_of_a_process_is_reported_with_the_end_of_its_log() -> None:
    host = Host()
    async with guarded(host) as slot:
        reasons: list[str] = []
        host.failures = 10**6
        host.may_start.clear()
        lose(slot, host)
        await eventually(lambda: not slot.reachable)
        reasons.append(slot.report("w").last_error)
        host.may_start.set()
        await eventually(lambda: len(host.attempts) > 1)
        reasons.append(slot.report("w").last_error)
    assert "exit code -9" in reasons[0]
    assert "out of memory" in reasons[0]
    assert "no such model" in reasons[1]


async def test_calls_to_an_engine_that_hangs_without_a_sign_are_ended() -> None:
    host = Host()
    request = SampleRequest(sample_index=0, input_ids=np.array([1], np.int32), max_new_tokens=10**6)
    async with guarded(host) as slot:
        running = asyncio.create_task(slot.generate([request], deadline_s=1_000))
        await eventually(lambda: bool(host.engine._decoding))
        host.engine.stall()
        host.failures = 1
        slot.move(Event.SUSPECTED)
        with pytest.raises(EngineUnavailable, match="no such model"):
            await running
        await eventually(lambda: slot.reachable)


async def test_an_engine_that_dies_as_soon_as_it_works_is_started_ever_more_slowly() -> None:
    host = Host()
    async with guarded(host) as slot:
        for life in range(1, 5):
            lose(slot, host)
            await eventually(lambda life=life: len(host.attempts) == life and slot.reachable)  # type: ignore[misc]
    gaps = [later - earlier for earlier, later in zip(host.attempts, host.attempts[1:], strict=False)]
    # Drawn from the upper halves of 0.1, 0.2, 0.4 s.
    assert gaps[0] >= 0.05
    assert gaps[1] >= 0.1
    assert gaps[2] >= 0.2


async def test_a_worker_whose_every_engine_is_lost_for_too_long_ends() -> None:
    host = Host()
    host.failures = 10**6
    slot = EngineSlot("e0", host.engine, await host.engine.info(), base_model=None)
    running = asyncio.create_task(EngineGuard(slot, host, [slot], timeout_s=0.2).run())
    lose(slot, host)
    with pytest.raises(EnginesLost, match="no such model"):
        await asyncio.wait_for(running, 20)
