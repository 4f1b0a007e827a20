"""SimulatedEngine on a virtual clock: timing, versions, pauses and injected faults."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer_wire.errors import InvalidField
from rollout_workers.engine.errors import EngineLoadFailed, EngineMalformed, EngineTimeout, EngineUnavailable
from rollout_workers.engine.simulated.answers import AnswerOptions
from rollout_workers.engine.simulated.clock import WallClock
from rollout_workers.engine.simulated.engine import SimulatedEngine, SimulatedEngineOptions
from rollout_workers.engine.types import Engine, GeneratedSample, PauseMode, SampleRequest, VersionSpan
from tests.support.virtual_clock import VirtualClock

PROMPT = np.array([3, 4, 5], dtype=np.int32)
ANYWHERE = Path("/not/read")


def make(clock: VirtualClock, *, length: float = 100, sigma: float = 0.0, **options: Any) -> SimulatedEngine:
    answers = AnswerOptions(length_median=length, length_sigma=sigma, vocab_size=50)
    chosen: dict[str, Any] = {"tokens_per_s": 10.0, "load_s": 1.0, "answers": answers, **options}
    return SimulatedEngine(SimulatedEngineOptions(**chosen), clock=clock)


def group(size: int, **changes: Any) -> list[SampleRequest]:
    chosen: dict[str, Any] = {"input_ids": PROMPT, "max_new_tokens": 1000, **changes}
    return [SampleRequest(sample_index=i, **chosen) for i in range(size)]


def spans(samples: Sequence[GeneratedSample]) -> list[list[tuple[str, int, int]]]:
    return [[(s.version_label, s.start, s.end) for s in sample.spans] for sample in samples]


async def test_a_sample_takes_its_tokens_over_the_speed() -> None:
    clock = VirtualClock()
    engine: Engine = make(clock)
    (sample,) = await clock.run(engine.generate(group(1)))
    assert clock.now_s() == pytest.approx(10)
    assert len(sample.output_ids) == len(sample.logprobs) == 100
    assert sample.spans == (VersionSpan("0", 0, 100),)
    assert sample.finish_reason == "stop"
    assert (sample.logprobs <= 0).all()
    assert ((sample.output_ids >= 0) & (sample.output_ids < 50)).all()


async def test_samples_beyond_the_slots_wait_their_turn() -> None:
    clock = VirtualClock()
    engine = make(clock, slots=2)
    await clock.run(engine.generate(group(5)))
    assert clock.now_s() == pytest.approx(30)


async def test_the_prompt_is_computed_before_the_first_token() -> None:
    clock = VirtualClock()
    await clock.run(make(clock, prefill_tokens_per_s=1.5).generate(group(1)))
    assert clock.now_s() == pytest.approx(12)


async def test_answers_depend_on_the_request_and_the_seed_alone() -> None:
    clock = VirtualClock()
    first, again = [await clock.run(make(clock, sigma=1.0).generate(group(8))) for _ in range(2)]
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a.output_ids, b.output_ids)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)
    lengths = [len(sample.output_ids) for sample in first]
    assert len(set(lengths)) > 4
    assert 20 < np.exp(np.log(lengths).mean()) < 500


async def test_an_interrupted_answer_goes_on_as_it_would_have_where_the_prompt_is_known() -> None:
    clock = VirtualClock()
    answers = AnswerOptions(length_median=60, length_sigma=0.4, prompt_tokens=len(PROMPT))
    engine = make(clock, answers=answers)
    (whole,) = await clock.run(engine.generate(group(1)))
    resumed = group(1, input_ids=np.concatenate([PROMPT, whole.output_ids[:20]]), max_new_tokens=980)
    (rest,) = await clock.run(engine.generate(resumed))
    assert np.array_equal(rest.output_ids, whole.output_ids[20:])
    assert np.array_equal(rest.logprobs, whole.logprobs[20:])


async def test_samples_in_a_crowd_slow_each_other_down_and_are_as_fast_again_alone() -> None:
    clock = VirtualClock()
    engine = make(clock, length=100, crowding=0.5)
    first = asyncio.create_task(engine.generate(group(1)))
    await clock.pass_time(2)  # 20 tokens alone.
    second = asyncio.create_task(engine.generate(group(1)))
    # Side by side 100 / 15 a second: the first one's 80 take 12 s; then 20 of the second are left, alone.
    await clock.pass_time(11.9)
    assert not first.done()
    await clock.pass_time(0.2)
    assert first.done()
    await clock.pass_time(1.8)
    assert not second.done()
    await clock.pass_time(0.2)
    assert second.done()


async def test_a_long_answer_is_cut_at_the_requested_length() -> None:
    clock = VirtualClock()
    (sample,) = await clock.run(make(clock).generate(group(1, max_new_tokens=7)))
    assert (len(sample.output_ids), sample.finish_reason) == (7, "length")


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
async def test_tokens_name_the_version_that_was_loaded_when_they_were_made(mode: PauseMode) -> None:
    clock = VirtualClock()
    engine = make(clock, prefill_tokens_per_s=10.0)

    async def reload_at_3_s() -> None:
        await clock.sleep(3.3)
        await engine.pause(mode)
        await engine.load_files(ANYWHERE, "1")
        await engine.resume()

    reloading = asyncio.create_task(reload_at_3_s())
    samples = await clock.run(engine.generate(group(2)))
    await reloading
    # 0.3 s for the prompt, 30 tokens until the pause; then 1 s of load and, after a retraction, 3.3 s of context.
    assert spans(samples) == [[("0", 0, 30), ("1", 30, 100)]] * 2
    assert clock.now_s() == pytest.approx(3.3 + 1 + (3.3 if mode is PauseMode.RETRACT else 0) + 7)


async def test_a_pause_that_aborts_returns_what_there_is() -> None:
    clock = VirtualClock()
    engine = make(clock, slots=1)
    work = asyncio.create_task(engine.generate(group(2)))
    await clock.pass_time(2.5)
    await engine.pause(PauseMode.ABORT)
    await clock.settle()
    assert not work.done()  # the second sample is still in the queue, and goes on after the pause
    await engine.resume()
    first, second = await clock.run(asyncio.wait_for(work, None))
    assert (len(first.output_ids), first.finish_reason) == (25, "abort")
    assert (len(second.output_ids), second.finish_reason) == (100, "stop")


async def test_abort_ends_running_queued_and_held_requests() -> None:
    clock = VirtualClock()
    engine = make(clock, slots=1)
    requests = group(3)
    work = asyncio.create_task(engine.generate(requests))
    await clock.pass_time(1)
    await engine.abort([requests[0].rid, requests[2].rid])
    await engine.pause(PauseMode.IN_PLACE)
    held = group(1)
    waiting = asyncio.create_task(engine.generate(held))
    await clock.settle()
    await engine.abort([held[0].rid])
    assert [s.aborted_in_queue for s in await waiting] == [True]
    await engine.resume()
    samples = await clock.run(asyncio.wait_for(work, None))
    assert [s.finish_reason for s in samples] == ["abort", "stop", "abort"]
    assert [s.aborted_in_queue for s in samples] == [False, False, True]
    assert [len(s.output_ids) for s in samples] == [10, 100, 0]


async def test_a_deadline_brings_back_what_there_is() -> None:
    clock = VirtualClock()
    (sample,) = await clock.run(make(clock).generate(group(1), deadline_s=4))
    assert (len(sample.output_ids), sample.finish_reason) == (40, "abort")


async def test_without_a_pause_a_load_waits_for_running_samples_and_holds_new_ones() -> None:
    clock = VirtualClock()
    engine = make(clock)
    old = asyncio.create_task(engine.generate(group(1)))
    await clock.pass_time(1)
    loading = asyncio.create_task(engine.load_files(ANYWHERE, "1"))
    await clock.settle()
    new = asyncio.create_task(engine.generate(group(1)))
    (sample,) = await clock.run(asyncio.wait_for(new, None))
    await loading
    assert spans(await old) == [[("0", 0, 100)]]
    assert spans([sample]) == [[("1", 0, 100)]]
    assert clock.now_s() == pytest.approx(10 + 1 + 10)


async def test_requests_are_checked_like_for_a_real_engine() -> None:
    clock = VirtualClock()
    with pytest.raises(InvalidField, match="token id 50"):
        await clock.run(make(clock).generate(group(1, input_ids=np.array([50], dtype=np.int32))))


# --- faults -----------------------------------------------------------------------------------------------------


async def test_a_failed_load_keeps_the_old_weights() -> None:
    clock = VirtualClock()
    engine = make(clock)
    engine.fail_next_loads(1)
    with pytest.raises(EngineLoadFailed) as error:
        await clock.run(engine.load_files(ANYWHERE, "1"))
    assert error.value.weights == "kept"
    assert await engine.loaded_version() == "0"
    await clock.run(engine.load_files(ANYWHERE, "1"))
    assert await engine.loaded_version() == "1"


async def test_a_stalled_engine_makes_no_token_and_answers_nothing() -> None:
    clock = VirtualClock()
    engine = make(clock, control_timeout_s=5.0)
    work = asyncio.create_task(engine.generate(group(1)))
    await clock.pass_time(3)
    engine.stall()
    assert not await engine.ready()
    with pytest.raises(EngineTimeout, match="pausing"):
        await clock.run(engine.pause(PauseMode.RETRACT))
    engine.unstall()
    samples = await clock.run(asyncio.wait_for(work, None))
    assert len(samples[0].output_ids) == 100
    assert clock.now_s() == pytest.approx(15)


async def test_a_stall_beyond_the_deadline_is_a_timeout() -> None:
    clock = VirtualClock()
    engine = make(clock)
    work = asyncio.create_task(engine.generate(group(1), deadline_s=6))
    await clock.pass_time(3)
    engine.stall()
    with pytest.raises(EngineTimeout, match="generating 1 samples"):
        await clock.run(asyncio.wait_for(work, None))


async def test_death_fails_what_is_in_flight_and_what_comes_until_the_engine_is_back() -> None:
    clock = VirtualClock()
    engine = make(clock, slots=1)
    await clock.run(engine.load_files(ANYWHERE, "1"))
    work = asyncio.create_task(engine.generate(group(3)))
    await clock.pass_time(3)
    await engine.die()
    with pytest.raises(EngineUnavailable):
        await clock.run(asyncio.wait_for(work, None))
    with pytest.raises(EngineUnavailable):
        await engine.generate(group(1))
    assert not await engine.ready()
    await engine.revive()
    assert await engine.loaded_version() == "0"
    assert len(await clock.run(engine.generate(group(1)))) == 1


async def test_a_sample_whose_answer_is_lost_takes_its_time_and_leaves_the_others_alone() -> None:
    clock = VirtualClock()
    engine = make(clock)
    engine.fail_samples(1, 1)
    samples = await clock.run(engine.generate(group(3)))
    assert clock.now_s() == pytest.approx(10)
    assert [(sample.fault, len(sample.output_ids)) for sample in samples] == [
        ("", 100), ("a fault was injected", 0), ("", 100),
    ]  # fmt: skip
    again = await clock.run(engine.generate(group(3)))
    assert not any(sample.fault for sample in again)
    assert engine.answered == {0: 2, 1: 2, 2: 2}


async def test_a_call_with_nothing_but_lost_answers_fails() -> None:
    clock = VirtualClock()
    engine = make(clock)
    engine.fail_samples(0, 1)
    with pytest.raises(EngineMalformed, match="a fault was injected"):
        await clock.run(engine.generate(group(1)))


async def test_a_cancelled_generation_gives_its_slots_back() -> None:
    clock = VirtualClock()
    engine = make(clock, slots=1)
    work = asyncio.create_task(engine.generate(group(3)))
    await clock.pass_time(1)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    await clock.run(engine.generate(group(1)))
    assert clock.now_s() == pytest.approx(11)


async def test_it_also_runs_on_the_wall_clock() -> None:
    answers = AnswerOptions(length_median=5, length_sigma=0)
    engine = SimulatedEngine(SimulatedEngineOptions(tokens_per_s=1e4, answers=answers), clock=WallClock())
    assert [len(s.output_ids) for s in await engine.generate(group(8))] == [5] * 8


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (SimulatedEngineOptions, {"slots": 0}),
        (SimulatedEngineOptions, {"tokens_per_s": 0.0}),
        (AnswerOptions, {"length_median": 0.5}),
        (AnswerOptions, {"length_sigma": -1.0}),
        (AnswerOptions, {"vocab_size": 1}),
    ],
)
def test_options_that_make_no_sense_are_refused(kind: type, values: dict[str, Any]) -> None:
    with pytest.raises(InvalidField) as error:
        kind(**values)
    assert error.value.attributes["field"] in values
