"""Rollout functions and the limits of a sample: new tokens of all turns together, and the context."""

from rollout_workers.episode import Episode
from rollout_workers.errors import EpisodeFull
from tests.workers.scene import Scene


async def test_new_tokens_of_all_turns_together_are_limited_by_the_task() -> None:
    async def rollout(episode: Episode) -> float:
        while True:
            await episode.generate()
            episode.append("tool", ids=[7])

    scene = Scene(rollout, group_size=1, max_new_tokens=25)
    assert await scene.run()
    sample = scene.progress.samples[0]
    assert sample.generated == 25
    assert sample.finish == "length"
    assert [note.finish for note in sample.turns if note.finish] == ["stop", "stop", "length"]


async def test_context_that_is_used_up_ends_the_sample_as_length() -> None:
    async def rollout(episode: Episode) -> float:
        await episode.generate()
        episode.append("tool", ids=[7] * 40)
        await episode.generate()
        raise AssertionError("not reached")

    scene = Scene(rollout, group_size=1, context_length=50)
    assert await scene.run()
    sample = scene.progress.samples[0]
    assert (sample.finish, len(sample), len(sample.turns)) == ("length", 10, 1)


async def test_function_may_decide_about_a_full_sample_itself() -> None:
    async def rollout(episode: Episode) -> float:
        await episode.generate()
        try:
            episode.append("tool", ids=[7] * episode.room + [7])
        except EpisodeFull:
            episode.finish("length")
            return -1.0
        return 0.0

    scene = Scene(rollout, group_size=1)
    assert await scene.run()
    assert scene.progress.samples[0].reward == -1.0


async def has_no_room(episode: Episode) -> float:
    await episode.set_prompt(ids=[1] * 999)
    await episode.generate()
    episode.append("tool", text="x")
    await episode.generate()
    return 1.0


async def test_prompt_that_leaves_no_room_for_an_answer_of_the_environment_ends_the_sample() -> None:
    scene = Scene(has_no_room, group_size=1, most=1)
    assert await scene.run()
    assert (scene.progress.samples[0].finish, len(scene.progress.samples[0])) == ("length", 1)
