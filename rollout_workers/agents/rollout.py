"""An agent as a rollout function: `--agent module:function`.

    async def agent(episode: AgentEpisode) -> float | None:
        client = AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key)
        ...

The agent is called once for every sample, with a base URL and a key of the sample's own. It talks to the model there as
to OpenAI or Anthropic, and returns the reward, or None for the reward function's. A plain function runs in a thread.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from rollout_workers.agents.answers import Reader
from rollout_workers.agents.conversation import Conversation
from rollout_workers.agents.episode import AgentEpisode
from rollout_workers.agents.server import AgentServer
from rollout_workers.functions import is_coroutine, load
from rollout_workers.rewarding.threads import RewardThreads

if TYPE_CHECKING:
    from rollout_workers.episode import Episode
    from rollout_workers.options import AgentOptions

_LAST_WORDS_S = 2.0
"""Time that an agent has to end once its requests cannot make a sample any more: some go on asking for minutes."""
_THREADS = 4_096
"""Agents of plain functions at once; as many as there are samples in flight, at most."""


def agent_of(options: "AgentOptions") -> "AgentRollout":
    """The agent that the options name. Raises InvalidField."""
    return AgentRollout(load("agent", options.function), options)


class AgentRollout:
    """Rollout function that lets an agent talk to the model over HTTP."""

    resumable = True
    """An agent that is called again, and repeats itself, is answered with the turns that are there."""

    def __init__(self, agent: Callable[[AgentEpisode], Any], options: "AgentOptions") -> None:
        self._agent = agent
        self._is_coroutine = is_coroutine(agent)
        self._server = AgentServer(options.listen, options.advertise)
        self._reader = Reader(options.tools, options.reasoning)
        self._branches = options.branches
        self._threads = RewardThreads(_THREADS, name="agent")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve the agents' requests."""
        async with self._server.serving():
            try:
                yield
            finally:
                self._threads.close()

    async def __call__(self, episode: "Episode") -> Any:  # noqa: ANN401 - the user's
        """Let the agent make one sample. Raises what it raises, or the reason why its requests make none."""
        conversation = Conversation(episode, self._reader, branches=self._branches)
        async with self._server.at_work(conversation) as place:
            making = asyncio.create_task(self._call(AgentEpisode(episode, place)))
            await _while_whole(making, conversation)
        failed = None if making.cancelled() else making.exception()
        # What was refused is the reason of what the agent makes of it.
        reason = conversation.fault or (conversation.full if failed is not None else None) or failed
        if reason is not None:
            raise reason from failed
        conversation.drop_unasked()
        episode.finish(conversation.finish)
        return making.result()

    async def _call(self, given: AgentEpisode) -> Any:  # noqa: ANN401 - the user's
        if self._is_coroutine:
            return await self._agent(given)
        returned: list[Any] = []
        await self._threads.run(lambda: returned.append(self._agent(given)))
        return returned[0]


async def _while_whole(making: "asyncio.Task[Any]", conversation: Conversation) -> None:
    """Wait for the agent, and end it soon after its conversation has broken."""
    broken = asyncio.create_task(conversation.broken.wait())
    try:
        await asyncio.wait([making, broken], return_when=asyncio.FIRST_COMPLETED)
        if not making.done():
            await asyncio.wait([making], timeout=_LAST_WORDS_S)
    finally:
        broken.cancel()
        making.cancel()
        await asyncio.wait([making])
