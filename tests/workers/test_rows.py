"""Further rows of a sample: compacted contexts, sub-agents and sides of a game, made by rollout functions."""

import asyncio
from typing import Any

import numpy as np
import pytest

from buffer_wire.errors import InvalidField
from buffer_wire.limits import MAX_SAMPLES
from rollout_workers.episode import Episode
from rollout_workers.errors import EpisodeFull, SamplesFailed
from rollout_workers.generation.columns.given import of_trajectory, returned
from tests.workers.building import eventually
from tests.workers.rollout_functions import compacts, plays
from tests.workers.scene import Scene


async def test_a_compacted_context_is_a_row_of_the_same_trajectory() -> None:
    scene = Scene(compacts, group_size=2)
    assert await scene.run()
    header, columns = scene.group()
    assert [sample.trajectory for sample in header.samples] == [1, 1, 2, 2]
    assert [sample.prompt_len for sample in header.samples] == [3, 2, 3, 2]
    assert [sample.reward for sample in header.samples] == [1.0, 1.0, 2.0, 2.0]
    assert [sample.loss_tokens for sample in header.samples] == [10] * 4
    assert columns["token_ids"][13:15].tolist() == [1, 9]
    assert columns["loss_mask"].tolist() == ([0] * 3 + [1] * 10 + [0] * 2 + [1] * 10) * 2
    assert scene.balanced()


async def test_sides_of_a_game_have_rewards_of_their_own_and_a_rival_is_not_trained_on() -> None:
    scene = Scene(plays, group_size=2)
    assert await scene.run()
    header, columns = scene.group()
    said = [(s.trajectory, s.policy, s.reward, s.HasField("trainable"), s.loss_tokens) for s in header.samples]
    assert said == [
        (1, "white", 1.0, False, 10), (1, "black", -1.0, False, 10), (1, "rival", 1.0, True, 0),
        (2, "white", 1.0, False, 10), (2, "black", -1.0, False, 10), (2, "rival", 1.0, True, 0),
    ]  # fmt: skip
    # What the rival wrote is there, and in no loss.
    assert not columns["loss_mask"][26:39].any()
    assert not columns["logprobs"][26:39].any()
    assert columns["token_ids"][29:39].any()
    assert scene.balanced()


async def test_sub_agents_run_side_by_side_and_rows_without_a_turn_are_left_out() -> None:
    together = asyncio.Barrier(3)

    async def sub(row: Episode, prompt: int) -> list[int]:
        await row.set_prompt(ids=[prompt])
        await together.wait()
        turn = await row.generate()
        row.finish("length")
        return list(turn.ids)

    async def rollout(episode: Episode) -> float:
        await episode.generate()
        episode.row()
        for ids in await asyncio.gather(*(sub(episode.row(), 2 + i) for i in range(3))):
            episode.append("tool", ids=ids)
        await episode.generate()
        episode.finish()
        return 0.5

    scene = Scene(rollout, group_size=1)
    assert await scene.run()
    header, columns = scene.group()
    assert [(s.trajectory, s.prompt_len, s.tokens, len(s.turns)) for s in header.samples] == [
        (1, 3, 53, 5),
        (1, 1, 11, 1),
        (1, 1, 11, 1),
        (1, 1, 11, 1),
    ]
    own = [columns["token_ids"][start + 1 : start + 11].tolist() for start in (53, 64, 75)]
    assert columns["token_ids"][13:43].tolist() == [*own[0], *own[1], *own[2]]


async def test_rows_draw_with_seeds_of_their_own() -> None:
    scene = Scene(plays, group_size=2)
    scene.progress.task.sampling.seed = 7
    seeds: list[int | None] = []
    generate = scene.engine.generate

    async def noted(requests: Any, **more: Any) -> Any:
        seeds.extend(request.seed for request in requests)
        return await generate(requests, **more)

    scene.engine.generate = noted  # type: ignore[method-assign]
    assert await scene.run()
    assert len(set(seeds)) == 6
    assert {7, 8} < set(seeds)


class Holds:
    """A row that is compacted, where the first attempt is held up in its second turn."""

    resumable = True

    def __init__(self) -> None:
        self.hold = asyncio.Event()
        self.found: list[int] = []

    async def __call__(self, episode: Episode) -> float:
        if not episode.turns:
            await episode.generate()
        episode.finish()
        row = episode.row(policy="second")
        self.found.append(len(row.turns))
        if not row.turns:
            await row.set_prompt(ids=[1, 9])
            await row.generate()
        if episode.sample_index:
            await self.hold.wait()
            row.append("tool", ids=[7])
            await row.generate()
        row.finish()
        return 1.0


async def test_partial_rollouts_carry_rows_and_a_resumable_function_finds_them() -> None:
    function = Holds()
    first = Scene(function, group_size=2)
    running = asyncio.create_task((episodes := await first.build()).run())
    await eventually(lambda: [s.finish for s in first.progress.samples] == ["stop", None] and len(function.found) == 2)
    await eventually(lambda: len(first.progress.samples[1].rows[0].turns) == 1)
    await episodes.stop()
    assert not await asyncio.wait_for(running, 10)
    kept = first.progress.to_partial_rollout("w")
    assert kept is not None
    assert [sample.trajectory for sample in kept.header.samples] == [1, 1, 2, 2]

    function.hold.set()
    second = Scene(function, group_size=2, partial_rollout=kept)
    assert await second.run()
    assert function.found == [0, 0, 1]
    assert second.engine.answered == {1 + (1 << 16): 1}
    header, _ = second.group()
    assert [(s.trajectory, s.policy, len(s.turns)) for s in header.samples] == [
        (1, "", 1), (1, "second", 1), (2, "", 1), (2, "second", 3),
    ]  # fmt: skip
    before = first.progress.samples[1].rows[0].output_ids
    assert second.progress.samples[1].rows[0].output_ids[:10].tolist() == before.tolist()
    assert (second.progress.resumed, first.progress.discarded) == (40, {})
    assert second.balanced()


async def test_a_row_that_is_not_finished_or_fails_fails_the_sample_by_name() -> None:
    async def leaves_open(episode: Episode) -> float:
        await episode.generate()
        episode.finish()
        await episode.row().generate()
        return 1.0

    scene = Scene(leaves_open, group_size=1, most=1)
    with pytest.raises(SamplesFailed, match=r"of row 1: it returned without having called episode\.finish"):
        await scene.run()
    assert scene.progress.discarded == {"rollout_failed": 20}

    async def no_number(episode: Episode) -> float:
        row = episode.row()
        row.reward = float("nan")
        for each in (episode, row):
            await each.generate()
            each.finish()
        return 1.0

    with pytest.raises(SamplesFailed, match="the reward of row 1 is nan"):
        await Scene(no_number, group_size=1, most=1).run()


async def test_what_a_function_has_left_generating_ends_with_it_and_reaches_no_later_attempt() -> None:
    left: list[asyncio.Task[Any]] = []

    async def rollout(episode: Episode) -> float:
        row = episode.row()
        if not left:
            left.append(asyncio.create_task(row.generate()))
            await asyncio.sleep(0)
            raise RuntimeError("too early")
        await episode.generate()
        episode.finish()
        return 1.0

    scene = Scene(rollout, group_size=1, length=400, tokens_per_s=1e3)
    assert await scene.run()
    assert left[0].cancelled()
    assert [len(sample.rows) for sample in scene.progress.samples] == [0]
    assert scene.progress.samples[0].output_ids.shape == (400,)
    assert scene.balanced()


async def test_a_row_that_ran_full_ends_the_sample_as_length() -> None:
    async def rollout(episode: Episode) -> float:
        await episode.generate()
        row = episode.row()
        while True:
            await row.generate()
            row.append("tool", ids=[7] * 40)

    scene = Scene(rollout, group_size=1, context_length=100)
    assert await scene.run()
    assert [row.finish for row in (scene.progress.samples[0], *scene.progress.samples[0].rows)] == ["length", "length"]

    async def lets_another_pass(episode: Episode) -> float:
        await episode.generate()
        raise EpisodeFull(0, "not of this episode")

    with pytest.raises(SamplesFailed, match="not of this episode"):
        await Scene(lets_another_pass, group_size=1, most=1).run()


async def test_values_of_a_sample_are_those_of_all_its_rows() -> None:
    async def rollout(episode: Episode) -> Any:
        row = episode.row()
        for each in (episode, row):
            await each.generate()
            each.column("place", np.arange(10, dtype=np.int32))
            each.finish()
        return {"reward": 1.0, "right": 0.25}

    scene = Scene(rollout, group_size=2)
    assert await scene.run()
    _, columns = scene.group()
    assert columns["right"].tolist() == [0.25] * 4
    assert columns["place"].tolist() == ([0] * 3 + list(range(10))) * 4
    assert set(of_trajectory(returned({"a": 1, "b": [1.0]}, prompt=0, response=1).columns)) == {"a"}


async def test_a_group_has_a_bounded_number_of_rows() -> None:
    async def rollout(episode: Episode) -> float:
        for _ in range(MAX_SAMPLES):
            episode.row()
        return 1.0

    scene = Scene(rollout, group_size=1, most=1)
    with pytest.raises(SamplesFailed, match="at most 1024"):
        await scene.run()
    for number in range(MAX_SAMPLES):
        scene.progress.begin_row(0, number)
    with pytest.raises(InvalidField, match="rows"):
        scene.progress.begin_row(0, MAX_SAMPLES)
