"""Agents that play a guessing game with the model, one by each API.

Neither knows anything of rollouts: each is given a URL and a key, and says how the game went. The model has MAX_GUESSES
turns to name a digit and is told "higher" or "lower". The reward is 1.0 where it found the number.
"""

import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from rollout_workers.agents.episode import AgentEpisode

if TYPE_CHECKING:
    from anthropic.types import MessageParam
    from openai.types.chat import ChatCompletionMessageParam

MAX_GUESSES = 4
QUESTION = "guess my number from 0 to 9."
FOUND = "found"


async def play(episode: AgentEpisode) -> float:
    """One game, by the API that the task names."""
    return await GAMES[episode.metadata["api"]](episode, episode.metadata["number"])


async def by_openai(episode: AgentEpisode, number: int) -> float:
    """The game over chat completions, as a stream."""
    client = AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key)
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION}]
    for _ in range(MAX_GUESSES):
        text = ""
        async for chunk in await client.chat.completions.create(
            model=episode.model, messages=messages, max_tokens=16, stream=True
        ):
            text += chunk.choices[0].delta.content or ""
        if (told := answer(text, number)) == FOUND:
            return 1.0
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": told}]
    return 0.0


async def by_anthropic(episode: AgentEpisode, number: int) -> float:
    """The game over messages."""
    client = AsyncAnthropic(base_url=episode.anthropic_url, api_key=episode.api_key)
    messages: list[MessageParam] = [{"role": "user", "content": QUESTION}]
    for _ in range(MAX_GUESSES):
        made = await client.messages.create(model=episode.model, messages=messages, max_tokens=16)
        text = "".join(block.text for block in made.content if block.type == "text")
        if (told := answer(text, number)) == FOUND:
            return 1.0
        messages += [{"role": "assistant", "content": made.content}, {"role": "user", "content": told}]
    return 0.0


GAMES: dict[str, Callable[[AgentEpisode, int], Awaitable[float]]] = {"openai": by_openai, "anthropic": by_anthropic}


def answer(text: str, number: int) -> str:
    """Reply to a guess, which is the first digit of the text."""
    guess = re.search(r"\d", text)
    if guess is None:
        return "that is no number."
    named = int(guess[0])
    return FOUND if named == number else "higher." if named < number else "lower."
