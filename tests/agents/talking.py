"""Agents that talk to a scripted model over HTTP, a group on one simulated engine."""

import json
from collections.abc import Callable
from typing import Any

import aiohttp

from rollout_workers.agents.episode import AgentEpisode
from rollout_workers.agents.rollout import AgentRollout
from rollout_workers.functions import Rollout
from rollout_workers.options import AgentOptions
from tests.workers.scene import Scene

Agent = Callable[[AgentEpisode], Any]
"""Coroutine function, or plain function."""

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


class AgentScene(Scene):
    """One group that an agent makes."""

    def __init__(self, agent: Agent, **more: Any) -> None:
        options = AgentOptions(
            "m:f",
            tools=more.pop("tools", "hermes"),
            reasoning=more.pop("reasoning", ""),
            branches=more.pop("branches", "refuse"),
        )
        self.agent = AgentRollout(agent, options)
        super().__init__(self.agent, **{"group_size": 1, "most": 1, **more})
        self.rollout = Rollout("m:f", self.agent)

    async def run(self) -> bool:
        async with self.rollout.running():
            return await super().run()


async def ask(
    episode: AgentEpisode, path: str, body: dict[str, Any], *, key: str | None = None, **headers: str
) -> tuple[int, Any]:
    """Status and answer of one request; of a stream, its text."""
    sent = {"Authorization": f"Bearer {key or episode.api_key}", **headers}
    async with (
        aiohttp.ClientSession(headers=sent) as session,
        session.post(episode.anthropic_url + path, json={"model": "m", **body}) as reply,
    ):
        text = await reply.text()
        return reply.status, json.loads(text) if reply.content_type == "application/json" else text


async def chat(episode: AgentEpisode, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """One turn by OpenAI's API: the choice, with its message."""
    status, answer = await ask(episode, CHAT, {"messages": messages, **more})
    assert status == 200, answer
    choice: dict[str, Any] = answer["choices"][0]
    return choice


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def events(text: str) -> list[Any]:
    """Values of a stream's events, in order; lines of comments and of names left out."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
