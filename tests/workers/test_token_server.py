"""Tests of what a library outside asks of the token server: done, left to the task, or refused by name."""

from typing import Any

import aiohttp
import pytest

from rollout_workers.episode import Episode
from rollout_workers.integrations.token_server import SESSION_HEADER, Conversation, TokenServer
from tests.workers.scene import Scene


async def answer_to(sampling: dict[str, Any]) -> int:
    """Tokens of the answer."""
    lengths: list[int] = []

    async def rollout(episode: Episode) -> float:
        reply = await Conversation(episode, lambda: "user").generate([1, 5, 6], sampling)
        lengths.append(len(reply["choices"][0]["token_ids"]))
        episode.finish()
        return 1.0

    assert await Scene(rollout, group_size=1, length=10, most=1).run()
    return lengths[0]


async def test_bounds_of_a_turn_are_the_requests() -> None:
    assert await answer_to({"max_tokens": 4}) == 4
    assert await answer_to({"max_tokens": 40, "min_tokens": 25}) == 25


async def test_sampling_that_the_task_decides_or_that_changes_nothing_passes() -> None:
    of_the_task = {"temperature": 0.3, "top_k": 20, "seed": 7, "min_p": 0.1}
    of_the_answer = {
        "n": 1,
        "logprobs": 1,
        "cache_salt": "s",
        "routed_experts_prompt_start": 3,
        "presence_penalty": 0.0,
    }
    assert await answer_to({**of_the_task, **of_the_answer, "guided_json": None}) == 10


@pytest.mark.parametrize("asked", [{"presence_penalty": 0.5}, {"logit_bias": {"3": -100}}, {"n": 2}])
async def test_what_would_change_the_tokens_and_is_not_done_is_refused_by_name(asked: dict[str, Any]) -> None:
    async def rollout(episode: Episode) -> float:
        with pytest.raises(ValueError, match=f"not supported: {next(iter(asked))}"):
            await Conversation(episode, lambda: "user").generate([1, 5, 6], asked)
        await episode.generate()
        episode.finish()
        return 1.0

    assert await Scene(rollout, group_size=1, most=1).run()


@pytest.mark.parametrize("images", ["features", "content_parts"])
async def test_images_are_refused_and_not_left_out(images: str) -> None:
    async def rollout(episode: Episode) -> float:
        conversation, server = Conversation(episode, lambda: "user"), TokenServer("policy")
        server.register("one", conversation)
        async with server.serving(), aiohttp.ClientSession(headers={SESSION_HEADER: "one"}) as session:
            url = f"{server.base_url.removesuffix('/v1')}/inference/v1/generate"
            async with session.post(url, json={"token_ids": [1, 5, 6], images: {"image": "…"}}) as response:
                assert f"images are not supported: {images}" in (await response.json())["error"]["message"]
        assert isinstance(conversation.fault, ValueError)
        await episode.generate()
        episode.finish()
        return 1.0

    assert await Scene(rollout, group_size=1, most=1).run()
