"""Rollout functions that are interrupted: finished samples are kept, and functions that can go on do so."""

import asyncio
from collections.abc import Callable

import pytest

from rollout_buffer.v1 import groups_pb2
from rollout_workers.engine.errors import EngineUnavailable
from rollout_workers.episode import Episode
from rollout_workers.errors import SamplesFailed
from rollout_workers.generation.attempts import Attempts
from rollout_workers.slots.engine_state import Event
from rollout_workers.tasks.rollout import SingleTurn
from tests.workers.building import eventually, time_passes
from tests.workers.scene import Scene, two_turns


async def waits_in_a_tool(episode: Episode) -> float:
    """Sample 0 is finished at once, the others are in their tool for ever."""
    await episode.generate()
    if episode.sample_index:
        episode.append("tool", ids=[7])
        await asyncio.get_running_loop().create_future()
    episode.finish()
    return 2.0


class Resumable:
    """Three turns with a tool between them; goes on from the turns that it finds."""

    resumable = True

    def __init__(self) -> None:
        self.found: list[list[str]] = []
        self.hold = asyncio.Event()
        self.hold.set()

    async def __call__(self, episode: Episode) -> float:
        self.found.append([turn.role for turn in episode.turns])
        while sum(turn.role == "assistant" for turn in episode.turns) < 3:
            if episode.turns and episode.turns[-1].role == "assistant":
                await self.hold.wait()
                episode.append("tool", ids=[7])
            await episode.generate()
        episode.finish()
        return 1.0


async def interrupted(scene: Scene, when: Callable[[], bool]) -> groups_pb2.Group | None:
    episodes = await scene.build()
    running = asyncio.create_task(episodes.run())
    await eventually(when)
    await episodes.stop()
    assert not await asyncio.wait_for(running, 10)
    assert scene.balanced()
    return scene.progress.to_partial_rollout("w")


async def test_interrupted_samples_start_anew_and_finished_siblings_are_kept() -> None:
    first = Scene(waits_in_a_tool)
    kept = await interrupted(first, lambda: sum(len(s.turns) for s in first.progress.samples) == 7)
    assert kept is not None
    assert first.progress.discarded == {"not_resumable": 30}
    second = Scene(two_turns, partial_rollout=kept)
    assert await second.run()
    assert second.engine.answered == {1: 2, 2: 2, 3: 2}
    header, _ = second.group()
    assert [sample.reward for sample in header.samples] == [2.0, 0.5, 0.5, 0.5]
    assert [len(sample.turns) for sample in header.samples] == [1, 3, 3, 3]


async def test_resumable_function_goes_on_in_the_middle_of_a_turn() -> None:
    function = Resumable()
    first = Scene(function, group_size=1, tokens_per_s=200.0, length=40)

    def in_second_turn() -> bool:
        return any(len(d.request.input_ids) > 40 for d in first.engine._decoding.values())

    async def later() -> groups_pb2.Group | None:
        episodes = await first.build()
        running = asyncio.create_task(episodes.run())
        await eventually(in_second_turn)
        await time_passes(0.1)
        await episodes.stop()
        assert not await asyncio.wait_for(running, 10)
        return first.progress.to_partial_rollout("w")

    kept = await later()
    assert kept is not None
    before = first.progress.samples[0]
    assert 41 < len(before) < 81
    assert first.progress.discarded == {}

    second = Scene(function, group_size=1, length=40, partial_rollout=kept)
    assert await second.run()
    assert function.found == [[], ["assistant", "tool"]]
    after = second.progress.samples[0]
    assert after.output_ids[: len(before)].tolist() == before.output_ids.tolist()
    assert [note.role for note in after.turns] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert after.turns[0].finish == "stop"
    assert second.balanced()
    assert second.progress.resumed == before.generated


async def test_resumable_function_goes_on_between_turns() -> None:
    function = Resumable()
    function.hold.clear()
    first = Scene(function, group_size=2)
    kept = await interrupted(first, lambda: sum(len(s.turns) for s in first.progress.samples) == 2)
    function.hold.set()
    function.found.clear()
    second = Scene(function, group_size=2, partial_rollout=kept)
    assert await second.run()
    assert function.found == [["assistant"], ["assistant"]]
    assert second.engine.answered == {0: 2, 1: 2}


async def test_quarantine_ends_the_functions() -> None:
    scene = Scene(waits_in_a_tool)
    running = asyncio.create_task((await scene.build()).run())
    await eventually(lambda: sum(len(s.turns) for s in scene.progress.samples) == 7)
    scene.slot.move(Event.QUARANTINED)
    assert not await asyncio.wait_for(running, 10)
    assert scene.progress.unfinished == [1, 2, 3]


async def test_lost_engine_keeps_the_turns_of_a_resumable_function() -> None:
    function = Resumable()
    function.hold.clear()
    scene = Scene(function, group_size=1)
    running = asyncio.create_task((await scene.build()).run())
    await eventually(lambda: len(scene.progress.samples[0].turns) == 1)
    await scene.engine.die()
    function.hold.set()
    await scene.slot.changes.until(lambda: scene.slot.suspect)
    scene.slot.move(Event.LOST)
    with pytest.raises(SamplesFailed, match="it died") as caught:
        await asyncio.wait_for(running, 10)
    assert isinstance(caught.value.errors[0], EngineUnavailable)
    assert [note.role for note in scene.progress.samples[0].turns] == ["assistant", "tool"]


async def test_single_turn_worker_does_not_go_on_with_the_turns_of_a_function() -> None:
    function = Resumable()
    function.hold.clear()
    first = Scene(function, group_size=1)
    kept = await interrupted(first, lambda: len(first.progress.samples[0].turns) == 1)
    second = Scene(function, group_size=1, partial_rollout=kept)
    await second.build()
    assert await SingleTurn(second.progress, second.slot, Attempts(1), timeout_s=10).run()
    assert second.progress.discarded == {"another_function": 10}
    assert second.progress.samples[0].turns == []


async def test_single_turn_worker_does_not_go_on_beside_further_rows_of_a_function() -> None:
    hold = asyncio.Event()

    async def begins_with_a_sub_agent(episode: Episode) -> float:
        await episode.row().generate()
        await hold.wait()
        return 1.0

    begins_with_a_sub_agent.resumable = True  # type: ignore[attr-defined]
    first = Scene(begins_with_a_sub_agent, group_size=1)
    kept = await interrupted(first, lambda: first.progress.tokens == 10)
    second = Scene(begins_with_a_sub_agent, group_size=1, partial_rollout=kept)
    await second.build()
    assert await SingleTurn(second.progress, second.slot, Attempts(1), timeout_s=10).run()
    assert second.progress.discarded == {"another_function": 10}
    assert second.progress.samples[0].rows == []
