"""Rollout functions that go wrong: what they did is said, and their sample alone is made again or given up."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from rollout_workers.episode import Episode
from rollout_workers.errors import SamplesFailed
from tests.workers.scene import Function, Scene, two_turns


async def test_function_that_raises_is_called_again_for_its_sample_alone() -> None:
    calls: Counter[int] = Counter()

    async def rollout(episode: Episode) -> float:
        calls[episode.sample_index] += 1
        await episode.generate()
        if episode.sample_index == 1 and calls[1] == 1:
            raise ZeroDivisionError("a bad day")
        episode.finish()
        return 1.0

    scene = Scene(rollout)
    assert await scene.run()
    assert calls == {0: 1, 1: 2, 2: 1, 3: 1}
    assert scene.progress.discarded == {"rollout_failed": 10}
    assert scene.balanced()


async def forgets_to_finish(episode: Episode) -> float:
    await episode.generate()
    return 1.0


async def never_generates(episode: Episode) -> float:
    return 1.0


async def finishes_nothing(episode: Episode) -> float:
    episode.finish()
    return 1.0


async def returns_text(episode: Episode) -> Any:
    await episode.generate()
    episode.finish()
    return "much"


async def speaks_first(episode: Episode) -> float:
    episode.append("tool", ids=[1])
    return 1.0


async def goes_on_after_the_end(episode: Episode) -> float:
    await episode.generate()
    episode.finish()
    await episode.generate()
    return 1.0


async def invents_tokens(episode: Episode) -> float:
    await episode.generate()
    episode.append("tool", ids=[99_999])
    return 1.0


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (forgets_to_finish, r"without having called episode\.finish\(\)"),
        (never_generates, r"without having called episode\.generate\(\)"),
        (finishes_nothing, r"nothing to finish: call generate\(\) first"),
        (returns_text, "it returned 'much', neither a finite number nor None"),
        (speaks_first, r"before the first generate\(\) there is only the prompt: set_prompt\(\) changes it"),
        (goes_on_after_the_end, r"generate\(\) after finish\(\)"),
        (invents_tokens, "token ids 99999 to 99999"),
    ],
)
async def test_error_says_what_the_function_did_wrong(function: Function, why: str) -> None:
    scene = Scene(function, group_size=1, most=1)
    with pytest.raises(SamplesFailed, match=f"m:f failed for sample 0: .*{why}"):
        await scene.run()
    assert scene.balanced()


async def test_function_that_always_raises_gives_its_sample_up_and_keeps_the_siblings() -> None:
    async def rollout(episode: Episode) -> float:
        await episode.generate()
        if episode.sample_index == 2:
            raise OSError("the sandbox is gone")
        episode.finish()
        return float(episode.sample_index)

    scene = Scene(rollout)
    with pytest.raises(SamplesFailed, match=r"sample 2 was given up: .*OSError: the sandbox is gone"):
        await scene.run()
    assert scene.engine.answered == {0: 1, 1: 1, 2: 3, 3: 1}
    kept = scene.progress.to_partial_rollout("w")

    second = Scene(two_turns, partial_rollout=kept)
    assert await second.run()
    assert second.engine.answered == {2: 2}
    header, _ = second.group()
    assert [sample.reward for sample in header.samples] == [0.0, 1.0, 0.5, 3.0]
    assert second.balanced()


async def test_function_that_takes_too_long_is_cancelled_and_counted() -> None:
    async def rollout(episode: Episode) -> float:
        await episode.generate()
        await asyncio.get_running_loop().create_future()
        return 1.0

    scene = Scene(rollout, group_size=1, most=1, timeout_s=0.1)
    with pytest.raises(SamplesFailed, match=r"was not finished in 0\.1 s: rollout function m:f was cancelled"):
        await scene.run()


async def test_two_calls_at_once_are_refused() -> None:
    async def rollout(episode: Episode) -> float:
        await asyncio.gather(episode.generate(), episode.generate())
        return 1.0

    with pytest.raises(SamplesFailed, match=r"generate\(\) while generate\(\) is under way"):
        await Scene(rollout, group_size=1, most=1).run()
