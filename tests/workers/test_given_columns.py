"""Columns that reward and rollout functions give: what is refused by name, and what arrives in the trainer's batch."""

from typing import Any

import numpy as np
import pytest

from buffer_wire.codec import Delivered
from buffer_wire.errors import InvalidField
from buffer_wire.layout import read_payload
from rollout_buffer.v1 import groups_pb2
from rollout_workers.episode import Episode
from rollout_workers.errors import SamplesFailed
from rollout_workers.generation.attempts import Attempts
from rollout_workers.generation.columns.given import column, ragged, returned
from rollout_workers.generation.samples import GroupProgress
from rollout_workers.rewards import RewardFunction, RewardInput, per_sample
from rollout_workers.tasks.scoring import GroupRewards
from tests.workers.scene import Scene
from tests.workers.test_reward_processes import scoring
from tests.workers.test_rewards import progress_of, scorer_of
from trainer_client.batch import Group


def parts(sample: RewardInput) -> Any:
    """A column of every kind."""
    tokens = len(sample.response_ids)
    return {
        "reward": 0.25,
        "format": True,
        "length_penalty": -tokens,
        "token_rewards": np.arange(tokens, dtype=np.float32),
        "steps": [0] * tokens,
        "boxes": ragged(np.full((sample.sample_index, 2), 7, np.int16)),
        "scores": per_sample(np.array([1, 2, 3], np.float16)),
    }


async def parts_in_time(sample: RewardInput) -> Any:
    return parts(sample)


async def group_of(progress: GroupProgress, scorer: Any) -> Group:
    """The group, scored, as the trainer has it."""
    rewards = GroupRewards(progress, scorer, Attempts(1))
    assert await rewards.ask() == []
    header, payload = progress.to_group(rewards.in_order, "w")
    body = groups_pb2.Group(header=header, payload=b"".join(payload)).SerializeToString()
    return Group.of(Delivered(body, 1, 0, 0), 0)


@pytest.mark.parametrize("way", ["thread", "coroutine", "process"])
async def test_columns_of_a_reward_function_arrive_with_their_sample(way: str) -> None:
    progress = progress_of(2, 3)
    if way == "process":
        async with scoring("tests.workers.test_given_columns:parts", count=1) as (scorer, _):
            group = await group_of(progress, scorer)
    else:
        group = await group_of(progress, scorer_of(parts if way == "thread" else parts_in_time))
    first, second = group.samples
    assert first.reward == 0.25
    assert (first.extras["format"].item(), second.extras["length_penalty"].item()) == (1, -3)
    assert {extra.dtype.name for extra in (first.extras["format"], first.extras["length_penalty"])} == {"float32"}
    assert second.extras["token_rewards"].tolist() == [0, 0, 0, 0, 1, 2]
    assert (second.extras["steps"].dtype.name, second.extras["steps"].shape) == ("float32", (6,))
    assert [len(sample.extras["boxes"]) for sample in group.samples] == [0, 1]
    assert second.extras["boxes"].tolist() == [[7, 7]]
    assert (first.extras["scores"].dtype.name, first.extras["scores"].tolist()) == ("float16", [1, 2, 3])


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("Bad Name", 1.0, "a name of 1 to 64"),
        ("logprobs", 1.0, "are taken"),
        ("sampling_mask_counts", 1.0, "are taken"),
        ("given_reward", 1.0, "are taken"),
        ("x", np.zeros(4), "2 rows, one for each token of the response, or 5"),
        ("x", np.zeros((3, 2)), r"shape \[3, 2\]"),
        ("x", np.zeros(2, np.uint64), "uint64"),
        ("x", "text", "str"),
        ("x", None, "objects of NoneType"),
        ("x", [[1], [1, 2]], "list"),
        ("x", ragged(3), "a number"),
        ("x", per_sample(np.zeros((1, 1, 1, 1, 1))), "at most 4 dimensions"),
    ],
)
def test_what_cannot_be_a_column_is_refused_by_name(name: str, value: Any, why: str) -> None:
    with pytest.raises(InvalidField, match=why) as refused:
        column(name, value, prompt=3, response=2)
    assert name in str(refused.value)


def test_rows_may_cover_the_prompt() -> None:
    assert column("x", np.arange(5), prompt=3, response=2).values.tolist() == [0, 1, 2, 3, 4]
    assert column("x", np.arange(2), prompt=3, response=2).values.tolist() == [0, 0, 0, 0, 1]
    assert returned(1.0, prompt=3, response=2).columns == {}


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda sample: {"format": 1.0}, "no 'reward' among what it gave"),
        (lambda sample: {"reward": 1.0, "x": np.zeros(9)}, "column x is 'shape .9.'; it must be 2 rows"),
    ],
)
async def test_a_reward_function_that_gives_no_column_fails_by_name(function: RewardFunction, why: str) -> None:
    with pytest.raises(SamplesFailed, match=why):
        await group_of(progress_of(2), scorer_of(function))


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ({}, "absent in sample 1'; it must be float32 .. per sample, as in sample 0"),
        ({"x": per_sample(np.int8(3))}, "int8 .. per sample in sample 1"),
        ({"x": ragged(np.ones(2))}, "ragged in sample 1"),
    ],
)
async def test_samples_of_a_group_have_the_same_columns(second: dict[str, Any], why: str) -> None:
    def reward(sample: RewardInput) -> Any:
        return {"reward": 0.0, "x": 1.0} if sample.sample_index == 0 else {"reward": 0.0, **second}

    with pytest.raises(InvalidField, match=why):
        await group_of(progress_of(2, 2), scorer_of(reward))


async def test_a_sample_may_have_no_rows_of_a_ragged_column() -> None:
    def reward(sample: RewardInput) -> Any:
        boxes: list[Any] = [[], np.ones((2, 4), np.int16), np.ones((0, 4), np.int16)]
        given = {"boxes": ragged(boxes[sample.sample_index])} if sample.sample_index < 3 else {}
        return {"reward": 0.0, **given}

    group = await group_of(progress_of(2, 2, 2, 2), scorer_of(reward))
    assert [sample.extras["boxes"].shape for sample in group.samples] == [(0, 4), (2, 4), (0, 4), (0, 4)]
    alone = await group_of(progress_of(2), scorer_of(reward))
    assert "boxes" not in alone.columns


async def by_turns(episode: Episode) -> Any:
    turn = await episode.generate()
    episode.column("turn_length", 0)
    episode.append("tool", ids=[7, 8])
    await episode.generate()
    episode.column("turn_length", len(turn.ids))
    episode.finish()
    return {"reward": 0.5, "teacher_logprobs": np.full(22, -1, np.float32)}


async def test_columns_of_a_rollout_function_cover_all_turns() -> None:
    scene = Scene(by_turns, group_size=2)
    assert await scene.run()
    header, columns = scene.group()
    assert [sample.reward for sample in header.samples] == [0.5, 0.5]
    assert columns["turn_length"].tolist() == [10, 10]
    assert columns["teacher_logprobs"].tolist() == ([0] * 3 + [-1] * 22) * 2


async def gives_late(episode: Episode) -> Any:
    await episode.generate()
    episode.finish()
    return {"boxes": ragged([[episode.sample_index] * 2]), "mean": per_sample(np.float64(2)), "twice": [1] * 10}


async def test_finished_samples_keep_their_columns_in_a_partial_rollout() -> None:
    scene = Scene(gives_late, group_size=2)
    assert await scene.run()
    scene.progress.start_anew(0, "not_resumable")
    partial_rollout = scene.progress.to_partial_rollout("w")
    again = Scene(gives_late, group_size=2, partial_rollout=partial_rollout)
    assert await again.run()
    assert again.progress.resumed == 10
    _, columns = again.group()
    assert columns["boxes"].tolist() == [[0, 0], [1, 1]]
    assert columns["mean"].tolist() == [2, 2]
    assert columns["twice"].tolist() == ([0] * 3 + [1] * 10) * 2


async def test_what_goes_on_has_the_columns_of_its_finished_siblings() -> None:
    scene = Scene(gives_late, group_size=2, most=1)
    assert await scene.run()
    scene.progress.start_anew(0, "not_resumable")

    async def gives_another(episode: Episode) -> Any:
        await episode.generate()
        episode.finish()
        return {"other": 1.0}

    again = Scene(gives_another, group_size=2, most=1, partial_rollout=scene.progress.to_partial_rollout("w"))
    with pytest.raises(Exception, match="m:f") as failed:
        await again.run()
    assert "column mean" in str(failed.value)


async def test_a_column_that_is_given_twice_is_refused() -> None:
    async def twice(episode: Episode) -> Any:
        await episode.generate()
        episode.column("x", 1.0)
        episode.finish()
        return {"x": 2.0}

    with pytest.raises(Exception, match="given twice"):
        await Scene(twice, group_size=1, most=1).run()


def test_groups_without_columns_stay_as_they_are() -> None:
    header, payload = progress_of(2).to_group([1.0], "w")
    assert set(read_payload(header, b"".join(payload))) == {"token_ids", "logprobs", "loss_mask"}
