"""Tests of what a worker counts of an engine's decoding, and how it tells the service."""

import asyncio
from typing import Any

import numpy as np
import pytest

from rollout_workers.engine.errors import EngineUnavailable
from rollout_workers.engine.simulated.answers import AnswerOptions
from rollout_workers.engine.simulated.engine import SimulatedEngine, SimulatedEngineOptions
from rollout_workers.engine.types import GeneratedSample, SampleRequest
from rollout_workers.slots.decoding import Decoded, DecodeMeter
from rollout_workers.slots.slot import EngineSlot
from tests.support.virtual_clock import VirtualClock
from tests.workers.building import generated


class Meter:
    """A meter whose clock and tokens in hand the test moves."""

    def __init__(self) -> None:
        self.now, self.in_hand = 100.0, 0
        self.meter = DecodeMeter(lambda: self.in_hand, clock=lambda: self.now)


def test_an_engine_is_busy_while_a_request_decodes() -> None:
    at = Meter()
    at.now += 5.0
    at.meter.changed(3)
    at.now += 2.0
    assert at.meter.show() == Decoded(0, 2_000, 6_000), "what goes on is in it"
    at.meter.changed(-2)
    at.now += 1.0
    at.meter.changed(1)
    at.now += 0.5
    at.meter.changed(-2)
    at.now += 60.0
    assert at.meter.show() == Decoded(0, 3_500, 6_000 + 1_000 + 1_000)


def test_tokens_that_have_arrived_of_running_requests_are_told_and_the_number_never_falls() -> None:
    at = Meter()
    at.meter.received(10)
    at.in_hand = 7
    assert at.meter.show().tokens == 17
    at.in_hand = 0
    assert at.meter.show().tokens == 17, "a request has ended, and its tokens are on their way"
    at.meter.received(9)
    assert at.meter.show().tokens == 19


class Scripted(SimulatedEngine):
    """Answers a call when the test says so, with what it says."""

    def __init__(self) -> None:
        super().__init__(SimulatedEngineOptions())
        self.answer: asyncio.Future[list[GeneratedSample]] = asyncio.get_running_loop().create_future()
        self.cut_off = 0

    async def generate(self, requests: Any, *, deadline_s: float | None = None) -> list[GeneratedSample]:
        return await self.answer

    def take_cut_off(self) -> int:
        tokens, self.cut_off = self.cut_off, 0
        return tokens


async def slot_of(engine: SimulatedEngine) -> EngineSlot:
    return EngineSlot("w.e0", engine, await engine.info(), base_model=None)


REQUEST = SampleRequest(sample_index=0, input_ids=np.array([1], np.int32), max_new_tokens=4)


async def test_answers_failures_and_cut_off_calls_are_counted() -> None:
    engine = Scripted()
    slot = await slot_of(engine)
    engine.answer.set_result([generated(0, [5, 6, 7]), generated(1, [])])
    await slot.generate([REQUEST], deadline_s=1.0)
    assert slot.full_report("w").decoded_tokens == 3

    engine.answer = asyncio.get_running_loop().create_future()
    error = EngineUnavailable("e", "generating", "reset")
    error.partial = (generated(0, [5, 6], finish="abort"),)
    engine.answer.set_exception(error)
    with pytest.raises(EngineUnavailable):
        await slot.generate([REQUEST], deadline_s=1.0)
    assert slot.full_report("w").decoded_tokens == 5

    engine.cut_off = 4
    assert slot.take_cut_off() == 4
    assert slot.full_report("w").decoded_tokens == 9
    assert slot.in_flight == 0


async def test_what_was_decoded_is_no_news() -> None:
    engine = Scripted()
    slot = await slot_of(engine)
    before = slot.report("w")
    engine.answer.set_result([generated(0, [5, 6, 7])])
    await slot.generate([REQUEST], deadline_s=1.0)
    assert slot.report("w") == before
    assert slot.full_report("w") != before


class Decoder:
    """A slot on a simulated engine, both on a clock of the test: 10 tokens/s for each request."""

    def __init__(self, clock: VirtualClock, slot: EngineSlot) -> None:
        self.clock = clock
        self.slot = slot

    @classmethod
    async def make(cls, *, slots: int, sigma: float = 0.0) -> "Decoder":
        clock = VirtualClock()
        answers = AnswerOptions(length_median=100, length_sigma=sigma)
        engine = SimulatedEngine(SimulatedEngineOptions(tokens_per_s=10.0, slots=slots, answers=answers), clock=clock)
        return cls(clock, EngineSlot("w.e0", engine, await engine.info(), base_model=None, clock=clock.now_s))

    @property
    def times(self) -> tuple[int, int]:
        report = self.slot.full_report("w")
        return report.decode_busy_ms, report.decode_request_ms


def requests(*limits: int) -> list[SampleRequest]:
    return [SampleRequest(sample_index=i, input_ids=REQUEST.input_ids, max_new_tokens=n) for i, n in enumerate(limits)]


async def test_no_more_requests_decode_than_the_engine_has_slots() -> None:
    at = await Decoder.make(slots=8, sigma=0.5)
    await at.clock.run(
        asyncio.wait_for(
            asyncio.gather(*(at.slot.generate(requests(*[1_000] * 8), deadline_s=9e4) for _ in range(16))), None
        )
    )
    busy_ms, request_ms = at.times
    assert 6 < request_ms / busy_ms <= 8


async def test_a_sample_decodes_until_it_ends_and_not_until_its_group_does() -> None:
    at = await Decoder.make(slots=8)
    await at.clock.run(at.slot.generate(requests(10, 20, 40), deadline_s=60))
    assert at.times == (4_000, 1_000 + 2_000 + 4_000)
    await at.clock.pass_time(60)
    assert at.times == (4_000, 7_000)


async def test_a_cancelled_call_decodes_no_longer_and_what_waited_never_did() -> None:
    at = await Decoder.make(slots=1)
    running = asyncio.create_task(at.slot.generate(requests(90, 90), deadline_s=60))
    await at.clock.pass_time(2)
    assert (at.times, at.slot.in_flight) == ((2_000, 2_000), 2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await at.clock.pass_time(60)
    assert (at.times, at.slot.in_flight) == ((2_000, 2_000), 0)


async def test_an_engine_that_was_started_anew_is_counted_with_the_one_before() -> None:
    at, other = await Decoder.make(slots=8), SimulatedEngine()
    await at.clock.run(at.slot.generate(requests(10), deadline_s=60))
    at.slot.engine = other
    other.on_decoding(1)
    await at.clock.pass_time(3)
    other.on_decoding(-1)
    assert at.times == (4_000, 4_000)
