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

from rollout_workers.agents.answers import Answer, Reader
from rollout_workers.agents.asked import Asked
from rollout_workers.agents.conversation import Conversation
from rollout_workers.agents.episode import AgentEpisode
from rollout_workers.agents.server import AgentServer
from rollout_workers.errors import EpisodeFull
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
        conversations = Conversations(episode, self._reader, branches=self._branches)
        async with self._server.at_work(conversations) as place:
            making = asyncio.create_task(self._call(AgentEpisode(episode, place)))
            await _while_whole(making, conversations.broken)
        failed = None if making.cancelled() else making.exception()
        # What was refused is the reason of what the agent makes of it.
        reason = conversations.fault or (conversations.full if failed is not None else None) or failed
        if reason is not None:
            raise reason from failed
        conversations.end()
        return making.result()

    async def _call(self, given: AgentEpisode) -> Any:  # noqa: ANN401 - the user's
        if self._is_coroutine:
            return await self._agent(given)
        returned: list[Any] = []
        await self._threads.run(lambda: returned.append(self._agent(given)))
        return returned[0]


class Conversations:
    """Conversations of one agent: one, or with `branches` rows as many as its requests make, each a row of the sample.

    A request belongs to the longest conversation from which it goes on. One that goes on from none begins another, also
    while others are being answered.
    """

    def __init__(self, episode: "Episode", reader: Reader, *, branches: str) -> None:
        self._episode = episode
        self._reader = reader
        self._branches = branches
        self.broken = asyncio.Event()
        """Set when the requests cannot make a sample any more."""
        self._all = [Conversation(episode, reader, self.broken, branches=branches)]

    @property
    def fault(self) -> Exception | None:
        """Reason why the requests cannot make a sample."""
        return next((each.fault for each in self._all if each.fault is not None), None)

    @property
    def full(self) -> EpisodeFull | None:
        """Error of what did not fit; None while everything does."""
        return next((each.full for each in self._all if each.full is not None), None)

    async def answer(self, asked: Asked, *, repeated: bool = False) -> Answer:
        """The answer to a request, as Conversation.answer gives it. Raises InvalidField for too many rows."""
        return await self._of(asked, repeated=repeated).answer(asked, repeated=repeated)

    def fail(self, why: Exception) -> Exception:
        """Note that no sample comes of it; returns the first reason."""
        return self.fault or self._all[0].fail(why)

    def end(self) -> None:
        """Finish the rows that have a turn: the agent has ended."""
        first, *further = self._all
        for each in (first, *(each for each in further if each.has_turns)):
            each.end()

    async def close(self) -> None:
        """End the requests under way; an agent that has not waited for them has not made a sample."""
        for each in self._all:
            await each.close()

    def _of(self, asked: Asked, *, repeated: bool) -> Conversation:
        first = self._all[0]
        if self._branches != "rows" or self.fault is not None or not first.has_begun:
            return first
        if repeated and (again := [each for each in self._all if each.is_asked_again(asked)]):
            return again[-1]
        if going_on := [each for each in self._all if each.goes_on(asked)]:
            return max(going_on, key=lambda each: each.said)
        self._all.append(Conversation(self._episode.row(), self._reader, self.broken))
        return self._all[-1]


async def _while_whole(making: "asyncio.Task[Any]", is_broken: asyncio.Event) -> None:
    """Wait for the agent, and end it soon after its conversations have broken."""
    broken = asyncio.create_task(is_broken.wait())
    try:
        await asyncio.wait([making, broken], return_when=asyncio.FIRST_COMPLETED)
        if not making.done():
            await asyncio.wait([making], timeout=_LAST_WORDS_S)
    finally:
        broken.cancel()
        making.cancel()
        await asyncio.wait([making])
