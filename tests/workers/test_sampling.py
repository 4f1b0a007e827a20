"""Tests of what an engine is asked for: a task's sampling parameters, sample by sample and over interruptions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from buffer_wire.errors import InvalidField
from rollout_buffer.v1 import tasks_pb2
from rollout_workers.engine.simulated.answers import AnswerOptions
from rollout_workers.engine.simulated.engine import SimulatedEngine, SimulatedEngineOptions
from rollout_workers.engine.types import GeneratedSample, SampleRequest
from rollout_workers.episode import Episode
from rollout_workers.generation.attempts import Attempts
from rollout_workers.generation.samples import GroupProgress
from rollout_workers.generation.sampling import request_of
from rollout_workers.slots.slot import EngineSlot
from rollout_workers.tasks.rollout import SingleTurn
from tests.workers.building import generated, lease, task
from tests.workers.scene import PROMPT, Scene


class Noting(SimulatedEngine):
    """Keeps every request that it is sent."""

    def __init__(self, length: float = 4) -> None:
        super().__init__(SimulatedEngineOptions(answers=AnswerOptions(length_median=length, length_sigma=0)))
        self.requests: list[SampleRequest] = []

    async def generate(
        self, requests: Sequence[SampleRequest], *, deadline_s: float | None = None
    ) -> list[GeneratedSample]:
        self.requests += requests
        return await super().generate(requests, deadline_s=deadline_s)


def asked_of(**fields: Any) -> SampleRequest:
    of = tasks_pb2.Task(sampling=tasks_pb2.SamplingParams(max_new_tokens=100, **fields))
    return request_of(of, 3, PROMPT, 10, generated=0)


def test_what_is_not_set_is_off() -> None:
    request = asked_of()
    assert (request.seed, request.min_p, request.repetition_penalty, request.min_new_tokens) == (None, 0, 1, 0)


def test_every_parameter_arrives_as_it_was_written() -> None:
    request = asked_of(min_p=0.05, repetition_penalty=1.1, min_new_tokens=7)
    assert (request.min_p, request.repetition_penalty, request.min_new_tokens) == (0.05, 1.1, 7)


def test_samples_of_a_group_draw_with_seeds_of_their_own() -> None:
    assert asked_of(seed=0).seed == 3
    assert asked_of(seed=(1 << 53) - 1).seed == (1 << 53) + 2


async def test_interrupted_sample_goes_on_with_its_seed_and_what_is_left_of_its_bounds() -> None:
    of = task(group_size=2)
    of.sampling.min_new_tokens = 6
    of.sampling.seed = 40
    progress = GroupProgress(lease(of), PROMPT)
    engine = Noting()
    slot = EngineSlot("e", engine, await engine.info(), base_model=None)
    slot.adopt(slot.loaded)
    progress.samples[1].append(generated(1, [8, 9], finish="abort"), slot.version_of)
    assert await SingleTurn(progress, slot, Attempts(1), timeout_s=30).run()
    assert [(r.seed, r.min_new_tokens, r.max_new_tokens) for r in engine.requests] == [(40, 6, 16), (41, 4, 14)]
    assert [len(sample) for sample in progress.samples] == [6, 6]


async def test_fewest_tokens_count_over_the_turns_of_a_sample_and_those_of_a_turn_by_themselves() -> None:
    scene = Scene(writes_three_turns, group_size=1, length=4)
    scene.task.sampling.min_new_tokens = 6
    scene.progress = GroupProgress(lease(scene.task), PROMPT)
    assert await scene.run()
    header, _ = scene.group()
    assert [turn.end - turn.start for turn in header.samples[0].turns if turn.role == "assistant"] == [6, 4, 9]


async def writes_three_turns(episode: Episode) -> float:
    await episode.generate()
    episode.append("tool", ids=[7])
    await episode.generate()
    episode.append("tool", ids=[7])
    await episode.generate(20, min_new_tokens=9)
    episode.finish()
    return 1.0


async def test_more_than_a_turn_may_have_cannot_be_its_fewest() -> None:
    async def asks_too_much(episode: Episode) -> float:
        with pytest.raises(InvalidField, match="min_new_tokens"):
            await episode.generate(5, min_new_tokens=6)
        await episode.generate()
        episode.finish()
        return 1.0

    assert await Scene(asks_too_much, group_size=1).run()


async def test_simulated_engine_answers_by_the_seed_and_stops_late_enough() -> None:
    engine = SimulatedEngine(SimulatedEngineOptions(tokens_per_s=1e4, answers=AnswerOptions(vocab_size=8)))

    async def tokens(**changes: Any) -> list[int]:
        fields: dict[str, Any] = {"sample_index": 0, "input_ids": PROMPT, "max_new_tokens": 40, **changes}
        (sample,) = await engine.generate([SampleRequest(**fields)])
        return list(sample.output_ids.tolist())

    assert await tokens(seed=5) == await tokens(seed=5, sample_index=2)
    assert await tokens(seed=5) != await tokens(seed=6)
    every = tuple(range(8))
    assert len(await tokens(stop_token_ids=every)) == 1
    assert len(await tokens(stop_token_ids=every, min_new_tokens=12)) == 13
    assert np.array_equal(await tokens(), await tokens())
