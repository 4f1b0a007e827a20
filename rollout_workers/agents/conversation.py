"""One conversation of an agent with the model, which is one sample: requests come in, turns go out.

Invariants: a conversation only grows: a request's messages begin with all that was said, the model's answers among
them, or it is refused with the place where it parts; the engine is given the tokens that are there and what the chat
template writes behind them; one request is answered at a time, to its end, whether its client waits or not; what was
refused fails the sample, whatever the agent makes of it.

An interrupted attempt's turns are replayed: the agent begins anew, and while its requests come to the same tokens it is
answered with the turns that are there.
"""

import asyncio
from typing import TYPE_CHECKING, Literal

import numpy as np

from rollout_workers.agents.answers import Answer, Reader
from rollout_workers.agents.asked import Asked, Message, RequestRefused
from rollout_workers.agents.rendering import Rendering, difference
from rollout_workers.episode import Episode, Turn
from rollout_workers.errors import EpisodeFull
from rollout_workers.generation.samples import TokenIds

if TYPE_CHECKING:
    from collections.abc import Sequence

_SHOWN = 40
"""Characters shown of a message that is not what it was."""


class Conversation:
    """Episode that is driven by requests."""

    def __init__(self, episode: Episode, reader: Reader) -> None:
        self._episode = episode
        self._reader = reader
        self._left = episode.turns
        """Turns that an interrupted attempt left."""
        self._taken = 0
        """Number of them that were replayed."""
        self._rendering: Rendering | None = None
        self._first: Asked | None = None
        self._messages: list[Message] = []
        """Everything that was said, with the model's answers as they were told."""
        self._turns: list[int] = []
        """Indexes of the messages that the model wrote."""
        self._last: tuple[Sequence[Message], Answer] | None = None
        """Messages of the last request that was answered, and its answer."""
        self._now: tuple[Sequence[Message], asyncio.Task[Answer | Exception]] | None = None
        """Messages of the request that is being answered."""
        self._last_turn: Turn | None = None
        self.fault: Exception | None = None
        """Reason why the requests do not make a sample."""

    @property
    def answers(self) -> int:
        """Number of turns that the model has written for this agent."""
        return len(self._turns)

    @property
    def finish(self) -> Literal["stop", "length"]:
        """Finish reason of the sample: "length" where the last turn was cut or nothing more fitted."""
        cut = self._last_turn is not None and self._last_turn.finish_reason == "length"
        return "length" if cut or self._episode.full is not None else "stop"

    async def answer(self, asked: Asked, *, repeated: bool = False) -> Answer:
        """The answer to a request. It is made to its end even if this call is cancelled.

        `repeated`: the client says that it sends the request again.

        Raises RequestRefused, EpisodeFull, and what ends the episode; CancelledError when it has ended.
        """
        if self.fault is not None:
            raise self.fault
        if self._now is not None:
            messages, making = self._now
            if not (repeated and messages == asked.messages):
                why = "a request of this episode is under way: one conversation makes one sample"
                self.fault = RequestRefused("parallel", why)
                raise self.fault
        elif repeated and self._last is not None and self._last[0] == asked.messages:
            return self._last[1]
        else:
            making = asyncio.create_task(self._make(asked))
            self._now = asked.messages, making
        made = await asyncio.shield(making)
        if isinstance(made, Exception):
            raise made
        return made

    async def close(self) -> None:
        """End the request under way; an agent that has not waited for it has not made a sample."""
        if self._now is not None:
            _, making = self._now
            making.cancel()
            await asyncio.wait([making])
            self.fault = self.fault or RuntimeError("the agent returned while a request of its was unanswered")

    async def _make(self, asked: Asked) -> Answer | Exception:
        """Make the turn; what goes wrong is returned, for there may be nobody to raise it to."""
        try:
            answer = await self._turn(asked)
        except EpisodeFull as full:
            return full
        except Exception as error:  # noqa: BLE001 - it is told to whoever awaits the sample
            self.fault = self.fault or error
            return error
        else:
            self._messages = [*asked.messages, answer.message]
            self._turns.append(len(asked.messages))
            self._last = asked.messages, answer
            return answer
        finally:
            self._now = None

    async def _turn(self, asked: Asked) -> Answer:
        episode, tokenizer = self._episode, self._episode.tokenizer
        if episode.full is not None:
            raise episode.full
        if asked.tools and asked.reads_calls and not self._reader.reads_tools:
            raise RequestRefused("unsupported", "not supported: tools, unless the worker has --agent-tools")
        if self._rendering is None or self._first is None:
            self._rendering, self._first = Rendering(tokenizer, asked.tools, asked.template), asked
            await self._begin(await self._rendering.prompt(asked.messages))
        else:
            self._check(asked, self._first)
            new = asked.messages[len(self._messages) :]
            last_id = int(self._last_turn.ids[-1]) if self._last_turn is not None else -1
            ids = await self._rendering.behind(asked.messages, self._turns, last_id)
            if len(ids):
                self._say(str(new[0]["role"]), ids)
        before = self._said
        turn = await self._next(asked)
        self._last_turn = turn
        return await self._reader.read(
            turn, asked, tokenizer, number=len(self._turns), prompt_tokens=before, engine=episode.engine_address
        )

    # ── tokens ───────────────────────────────────────────────────────────────

    @property
    def _said(self) -> int:
        """Tokens of the conversation so far, those of turns to be replayed not counted."""
        turns = self._left[: self._taken] + self._episode.turns[len(self._left) :]
        return len(self._episode.prompt_ids) + sum(len(turn.ids) for turn in turns)

    async def _begin(self, ids: TokenIds) -> None:
        if not self._episode.resumed:
            await self._episode.set_prompt(ids=ids)
        elif not np.array_equal(ids, self._episode.prompt_ids):
            raise _diverged("the prompt is", ids, self._episode.prompt_ids)

    def _say(self, role: str, ids: TokenIds) -> None:
        if self._taken == len(self._left):
            self._episode.append(role, ids=ids)
            return
        there = self._left[self._taken]
        if there.role == "assistant" or not np.array_equal(there.ids, ids):
            raise _diverged(f"turn {self._taken} is", ids, there.ids)
        self._taken += 1

    async def _next(self, asked: Asked) -> Turn:
        if self._taken == len(self._left):
            return await self._episode.generate(asked.max_tokens, stop=asked.stop)
        there = self._left[self._taken]
        if there.role != "assistant":
            raise _diverged(f"turn {self._taken} is", np.empty(0, np.int32), there.ids)
        self._taken += 1
        return there

    # ── messages ─────────────────────────────────────────────────────────────

    def _check(self, asked: Asked, first: Asked) -> None:
        """Raise RequestRefused where a request does not go on from what was said."""
        if list(asked.tools) != list(first.tools):
            raise RequestRefused("branch", "its tools are not those of the episode's first request")
        if dict(asked.template) != dict(first.template):
            raise RequestRefused("branch", "chat_template_kwargs are not those of the episode's first request")
        for i, (before, now) in enumerate(zip(self._messages, asked.messages, strict=False)):
            if wrong := _unlike(before, now, written=i in self._turns):
                raise RequestRefused(
                    "branch",
                    f"message {i} ({before['role']}) {wrong}: a conversation that branches, or that was compacted, is "
                    "not one sample",
                )
        if len(asked.messages) <= len(self._messages):
            raise RequestRefused(
                "branch",
                f"it has {len(asked.messages)} messages and ends where the conversation has {len(self._messages)}: "
                "nothing new is said",
            )
        if asked.messages[-1]["role"] == "assistant":
            raise RequestRefused("unsupported", "not supported: a last message of the assistant, to go on from")


def _unlike(before: Message, now: Message, *, written: bool) -> str:
    """Reason why `now` is another message than `before`, or nothing.

    `written`: the model wrote it. Clients may then leave its outer white space and the ids of its calls out, for it is
    found by them and never read.
    """
    if before["role"] != now["role"]:
        return f"is now one of {now['role']}"
    old, new = before["content"], now["content"]
    if written:
        old, new = old.strip(), new.strip()
    if old != new:
        at = difference(old, new)
        return f"is not what was said: at character {at} {new[at : at + _SHOWN]!r} and not {old[at : at + _SHOWN]!r}"
    if written:
        return "" if _functions(before) == _functions(now) else "has other tool calls than were made"
    return "" if {**before, "content": ""} == {**now, "content": ""} else "has other fields"


def _functions(message: Message) -> list[object]:
    return [call["function"] for call in message.get("tool_calls", ())]


def _diverged(what: str, now: TokenIds, before: TokenIds) -> RequestRefused:
    same = min(len(now), len(before))
    at = next((i for i in range(same) if now[i] != before[i]), same)
    return RequestRefused(
        "diverged",
        f"the agent was called again and does not repeat itself: {what} another from token {at} on "
        f"({len(now)} tokens, {len(before)} before)",
    )
