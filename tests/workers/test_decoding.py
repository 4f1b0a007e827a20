"""What a worker counts of an engine's decoding, and how it tells the service."""

import asyncio
from typing import Any

import numpy as np
import pytest

from rollout_workers.decoding import Decoded, DecodeMeter
from rollout_workers.engine.errors import EngineUnavailable
from rollout_workers.engine.simulated import SimulatedEngine, SimulatedEngineOptions
from rollout_workers.engine.types import GeneratedSample, SampleRequest
from rollout_workers.slot import EngineSlot
from tests.workers.building import generated


class Meter:
    """A meter whose clock and tokens in hand the test moves."""

    def __init__(self) -> None:
        self.now, self.in_hand = 100.0, 0
        self.meter = DecodeMeter(lambda: self.in_hand, clock=lambda: self.now)


def test_an_engine_is_busy_while_it_has_a_request() -> None:
    at = Meter()
    at.now += 5.0
    at.meter.began(3)
    at.now += 2.0
    assert at.meter.show() == Decoded(0, 2_000, 6_000), "what goes on is in it"
    at.meter.ended(2)
    at.now += 1.0
    at.meter.began(1)
    at.now += 0.5
    at.meter.ended(2)
    at.now += 60.0
    assert at.meter.show() == Decoded(0, 3_500, 6_000 + 1_000 + 1_000)
    assert at.meter.requests == 0


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
