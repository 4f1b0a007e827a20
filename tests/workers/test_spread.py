"""Samples of a group on several engines: where a move pays, and that every token is exact, its version too."""

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from rollout_workers.counters import Counters
from rollout_workers.engine.simulated.engine import SimulatedEngine, SimulatedEngineOptions
from rollout_workers.engine.types import SampleRequest
from rollout_workers.generation import spread as spreading
from rollout_workers.generation.attempts import Attempts
from rollout_workers.generation.expectations import Lengths, Paces
from rollout_workers.generation.samples import GroupProgress
from rollout_workers.generation.spread import Spread
from rollout_workers.slots.engine_state import Event
from rollout_workers.slots.slot import EngineSlot
from rollout_workers.tasks.rollout import SingleTurn
from rollout_workers.versions import Version
from tests.workers.building import eventually, lease, task, time_passes
from tests.workers.scene import PROMPT
from tests.workers.scripted import script_lengths

LONG = 1_200


def last_is_long(request: SampleRequest) -> int:
    return LONG if request.sample_index == 3 else 20


class Two:
    """A slow engine that holds the lease, and a fast one beside it; both paces are known."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, length: Callable[[SampleRequest], int]) -> None:
        monkeypatch.setattr(spreading, "POLL_S", 0.02)
        monkeypatch.setattr(spreading, "IDLE_S", 0.1)
        monkeypatch.setattr(spreading, "LEAST_S", 0.2)
        script_lengths(monkeypatch, length)
        self.counters = Counters()

    async def build(self, *, here: str = "1.1", there: str = "1.1", known: bool = True, **more: Any) -> SingleTurn:
        self.engines = [
            SimulatedEngine(SimulatedEngineOptions(tokens_per_s=speed, version_label=label), address=f"simulated://{i}")
            for i, (speed, label) in enumerate([(500.0, here), (8_000.0, there)])
        ]
        self.slots = []
        for i, engine in enumerate(self.engines):
            slot = EngineSlot(f"e{i}", engine, await engine.info(), base_model=None)
            await slot.refresh()
            slot.adopt(slot.loaded)
            self.slots.append(slot)
        self.spread = Spread(self.slots, self.counters)
        if known:
            for _ in range(40):
                self.spread.lengths.saw(LONG)
                # Of one request: the fast engine's. Of four: the slow one's.
                self.spread.paces.saw(1, 1 / 8_000)
                self.spread.paces.saw(4, 1 / 500)
        self.progress = GroupProgress(lease(task(max_new_tokens=2_000, **more)), PROMPT)
        return SingleTurn(self.progress, self.slots[0], Attempts(3), timeout_s=30, spread=self.spread)

    def crowd(self) -> None:
        """Have the slow engine look as if others of this worker's requests ran there, too."""
        self.slots[0].in_flight += 1

    def assert_exact(self, lengths: list[int]) -> None:
        """Every token and log-probability is that of its place, and every token has one version; nothing was lost."""
        assert [len(sample) for sample in self.progress.samples] == lengths
        for sample, length in zip(self.progress.samples, lengths, strict=True):
            assert np.array_equal(sample.output_ids, np.arange(length) % 1_024)
            assert np.array_equal(sample.logprobs, np.arange(length, dtype=np.float32) / np.float32(-1_000))
            assert (sample.spans[0].start, sample.spans[-1].end) == (0, length)
            assert all(one.end == two.start and one.version < two.version for one, two in pairwise(sample.spans))
        assert (self.progress.received, self.progress.discarded) == (sum(lengths), {})


async def finish(two: Two, turn: SingleTurn) -> bool:
    looking = asyncio.create_task(two.spread.run())
    try:
        return await asyncio.wait_for(turn.run(), 20)
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        assert two.spread.guests(two.slots[1]) == 0


async def test_the_last_sample_goes_on_at_an_idle_engine_and_every_token_is_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two = Two(monkeypatch, last_is_long)
    turn = await two.build(there="1.3")
    monkeypatch.setattr(spreading.Spread, "elsewhere", lambda *_: None)
    two.crowd()
    running = asyncio.create_task(finish(two, turn))
    await eventually(lambda: two.slots[1].in_flight == 1)
    assert turn.running == 0, "the lease's engine has room again"
    assert two.spread.guests(two.slots[1]) == 0.25
    assert await running
    two.assert_exact([20, 20, 20, LONG])
    spans = two.progress.samples[3].spans
    assert [span.version for span in spans] == [Version(1, 1), Version(1, 3)]
    assert 20 <= spans[0].end < LONG / 2
    assert two.counters.samples_moved == 1
    assert two.engines[1].answered == {3: 1}


async def test_half_of_a_group_begins_at_an_idle_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    two = Two(monkeypatch, lambda _: 400)
    turn = await two.build(group_size=2)
    two.crowd()
    looking = asyncio.create_task(two.spread.run())
    await time_passes(0.2)  # It has to have been idle for a while.
    looking.cancel()
    assert await turn.run()
    two.assert_exact([400, 400])
    assert (two.engines[0].answered, two.engines[1].answered) == ({0: 1}, {1: 1})
    assert two.counters.samples_moved == 1


@pytest.mark.parametrize("why", ["nothing is known", "as slow there", "older weights", "it has work", "it fails"])
async def test_samples_stay_where_a_move_does_not_pay_or_may_not_be(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    two = Two(monkeypatch, lambda request: 100 if request.sample_index == 3 else 20)
    turn = await two.build(there="1.0" if why == "older weights" else "1.1", known=why != "nothing is known")
    two.crowd()
    if why == "as slow there":
        two.spread.paces = Paces()
        for requests in range(1, 41):
            two.spread.paces.saw(requests, 1 / 500)
    elif why == "it has work":
        two.slots[1].in_flight += 1
    elif why == "it fails":
        two.slots[1].move(Event.SUSPECTED)
    assert await finish(two, turn)
    two.assert_exact([20, 20, 20, 100])
    assert (two.counters.samples_moved, two.engines[1].answered) == (0, {})


async def test_what_an_engine_that_dies_had_taken_over_comes_home(monkeypatch: pytest.MonkeyPatch) -> None:
    two = Two(monkeypatch, lambda request: 400 if request.sample_index == 3 else 20)
    turn = await two.build()
    monkeypatch.setattr(spreading.Spread, "elsewhere", lambda *_: None)
    two.crowd()
    running = asyncio.create_task(finish(two, turn))
    await eventually(lambda: two.slots[1].in_flight == 1)
    await two.engines[1].die()
    assert await running
    assert turn._attempts.again == 1
    two.assert_exact([20, 20, 20, 400])
    assert two.engines[0].answered[3] == 2


async def test_a_stop_brings_back_what_both_engines_have(monkeypatch: pytest.MonkeyPatch) -> None:
    two = Two(monkeypatch, lambda request: 1_900 if request.sample_index == 3 else 20)
    turn = await two.build()
    monkeypatch.setattr(spreading.Spread, "elsewhere", lambda *_: None)
    two.crowd()
    running = asyncio.create_task(finish(two, turn))
    await eventually(lambda: two.slots[1].in_flight == 1)
    await turn.stop()
    assert not await running
    assert two.progress.unfinished == [3]
    assert two.progress.received == two.progress.tokens > 80


async def test_nothing_begins_elsewhere_after_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    two = Two(monkeypatch, lambda _: 400)
    turn = await two.build(group_size=2)
    monkeypatch.setattr(spreading.Spread, "elsewhere", lambda *_: two.slots[1])
    await turn.stop()
    assert not await turn.run()
    assert (two.progress.received, two.engines[1].answered) == (0, {})


async def test_surplus_ends_as_soon_as_samples_that_ended_elsewhere_make_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two = Two(monkeypatch, lambda request: 1_900 if request.sample_index in (0, 3) else 20)
    turn = await two.build(group_size=2)
    turn.progress = two.progress = GroupProgress(two.progress.lease, PROMPT, surplus=2)
    turn._home.progress = two.progress
    # Two begin on each engine, of which one ends at once and one takes long, on the slow engine for 3.8 s.
    monkeypatch.setattr(spreading.Spread, "elsewhere", lambda *_: two.slots[1])
    monkeypatch.setattr(two.engines[1], "options", SimulatedEngineOptions(tokens_per_s=500.0))
    assert await asyncio.wait_for(turn.run(), 1.5)
    assert [sample.finish for sample in two.progress.samples] == [None, "stop", "stop", None]


# ── what is expected ─────────────────────────────────────────────────────────


def test_the_rest_of_a_response_is_that_of_longer_ones() -> None:
    lengths = Lengths()
    for length in range(100, 200):
        assert (lengths.rest(0) is None) == (length < 132)
        lengths.saw(length)
    assert lengths.rest(0) == 149.5
    assert lengths.rest(149) == 25.5
    assert lengths.rest(1_000) == 500, "longer than any: a share of what is there"


def test_paces_lie_on_a_line_over_the_requests() -> None:
    paces = Paces()
    rng = np.random.default_rng(0)
    for count in range(40):
        assert (paces.at(1) is None) == (count < 32)
        requests = float(rng.uniform(8, 64))
        paces.saw(requests, 0.02 + 0.001 * requests + 0.002 * float(rng.standard_normal()))
    assert paces.at(20) == pytest.approx(0.04, abs=0.002)
    assert 0.02 < (paces.at(1) or 0) < 0.04, "no less than was seen"
    assert paces.at(64) == pytest.approx(0.084, abs=0.004)


def test_paces_that_do_not_depend_on_the_requests_are_their_mean() -> None:
    paces = Paces()
    rng = np.random.default_rng(1)
    for _ in range(200):
        paces.saw(float(rng.uniform(1, 64)), 0.05 + 0.01 * float(rng.standard_normal()))
    assert paces.at(1) == paces.at(64) == pytest.approx(0.05, abs=0.002)
