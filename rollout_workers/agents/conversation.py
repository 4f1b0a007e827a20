"""One conversation of an agent with the model, which is one row of a sample: requests come in, turns go out.

Invariants: a request begins with all that was said, the model's answers among them, or it is refused with the place
where it parts; with `branches` last, what is behind that place is discarded; the engine is given the tokens that are
there, and what the chat template writes behind them; one request is answered at a time, to its end, whether its client
waits or not; what was refused fails the sample, whatever the agent makes of it.

An interrupted attempt's turns are replayed: the agent begins anew, and while its requests come to the same tokens it is
answered with the turns that are there. What it does not ask for again is discarded.
"""

import asyncio
from typing import TYPE_CHECKING, Literal

import numpy as np

from rollout_workers.agents.answers import Answer, Reader
from rollout_workers.agents.asked import Asked, Message, RequestRefused
from rollout_workers.agents.rendering import Rendering
from rollout_workers.agents.said import Parting, part, same_setting
from rollout_workers.episode import Episode, Turn
from rollout_workers.errors import EpisodeFull

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout_workers.generation.sample import TokenIds

NOT_REPEATED = "not_repeated"
"""Reason of discarded tokens: the agent was called again, and did not ask for them again."""


class Conversation:
    """Episode that is driven by requests. `broken` is set when they cannot make a sample any more."""

    def __init__(self, episode: Episode, reader: Reader, broken: asyncio.Event, *, branches: str = "refuse") -> None:
        self._episode = episode
        self._reader = reader
        self._goes_back = branches == "last"
        self._left = episode.turns
        """Turns that an interrupted attempt left."""
        self._taken = 0
        """Number of them that were replayed."""
        self._rendering: Rendering | None = None
        self._first: Asked | None = None
        self._messages: list[Message] = []
        """Everything that was said, with the model's answers as they were told."""
        self._turns: list[tuple[int, Turn]] = []
        """Turns that the model wrote, with the indexes of their messages."""
        self._last: tuple[Sequence[Message], Answer] | None = None
        """Messages of the last request that was answered, and its answer."""
        self._now: tuple[Sequence[Message], asyncio.Task[Answer | Exception]] | None = None
        """Messages of the request that is being answered."""
        self._broken = broken
        self.fault: Exception | None = None
        """Reason why they cannot."""
        self.full: EpisodeFull | None = None
        """Error of what did not fit; None while everything does."""

    @property
    def finish(self) -> Literal["stop", "length"]:
        """Finish reason of the sample: "length" where the last turn was cut or nothing more fitted."""
        cut = bool(self._turns) and self._turns[-1][1].finish_reason == "length"
        return "length" if cut or self.full is not None else "stop"

    @property
    def has_begun(self) -> bool:
        """True once it was asked something."""
        return self._now is not None or self._first is not None

    @property
    def has_turns(self) -> bool:
        """True once the model has written."""
        return bool(self._turns)

    @property
    def said(self) -> int:
        """Number of messages that were said."""
        return len(self._messages)

    def is_asked_again(self, asked: Asked) -> bool:
        """True for the messages of the request that is being answered, or else of the last one that was."""
        last = self._now or self._last
        return last is not None and last[0] == asked.messages

    def goes_on(self, asked: Asked) -> bool:
        """True where a request goes on from what was said."""
        return self._now is None and self._first is not None and self._parting(asked) is None

    def end(self) -> None:
        """Finish the row: the agent has ended. What it did not ask for again is discarded."""
        if self._taken < len(self._left):
            self._back(self._taken, NOT_REPEATED)
        self._episode.finish(self.finish)

    async def answer(self, asked: Asked, *, repeated: bool = False) -> Answer:
        """The answer to a request. It is made to its end even if this call is cancelled.

        `repeated`: the client says that it sends the request again. Raises RequestRefused, EpisodeFull, and what ends
        the episode; CancelledError when it has ended.
        """
        if self.fault is not None:
            raise self.fault
        if self._now is not None:
            messages, making = self._now
            if not (repeated and messages == asked.messages):
                why = "a request of this episode is under way: one conversation makes one sample"
                raise self.fail(RequestRefused("parallel", why))
        elif repeated and self._last is not None and self._last[0] == asked.messages:
            return self._last[1]
        else:
            making = asyncio.create_task(self._make(asked))
            self._now = asked.messages, making
        made = await asyncio.shield(making)
        if isinstance(made, Exception):
            raise made
        return made

    def fail(self, why: Exception) -> Exception:
        """Note that no sample comes of it; returns the first reason."""
        self.fault = self.fault or why
        self._broken.set()
        return self.fault

    async def close(self) -> None:
        """End the request under way; an agent that has not waited for it has not made a sample."""
        if self._now is not None:
            _, making = self._now
            making.cancel()
            await asyncio.wait([making])
            self.fail(RuntimeError("the agent returned while a request of its was unanswered"))

    async def _make(self, asked: Asked) -> Answer | Exception:
        """Make the turn; what goes wrong is returned, for there may be nobody to raise it to."""
        try:
            turn, before = await self._next(asked)
            answer = await self._reader.read(
                turn,
                asked,
                self._episode.tokenizer,
                number=len(self._turns),
                prompt_tokens=before,
                engine=self._episode.engine_address,
            )
        except EpisodeFull as full:
            self.full = full
            return full
        except Exception as error:  # noqa: BLE001 - it is told to whoever awaits the sample
            return self.fail(error)
        else:
            self._messages = [*asked.messages, answer.message]
            self._turns.append((len(asked.messages), turn))
            self._last = asked.messages, answer
            return answer
        finally:
            self._now = None

    async def _next(self, asked: Asked) -> tuple[Turn, int]:
        """The model's turn, and the number of tokens before it."""
        if asked.tools and asked.reads_calls and not self._reader.reads_tools:
            raise RequestRefused("unsupported", "not supported: tools, unless the worker has --agent-tools")
        if asked.messages[-1]["role"] == "assistant":
            raise RequestRefused("unsupported", "not supported: a last message of the assistant, to go on from")
        self._part(asked)
        if self.full is not None:
            raise self.full
        if self._rendering is None:
            self._rendering, self._first = Rendering(self._episode.tokenizer, asked.tools, asked.template), asked
            await self._begin(await self._rendering.prompt(asked.messages))
        else:
            new = asked.messages[len(self._messages)]
            indexes, turns = zip(*self._turns, strict=True)
            ids = await self._rendering.behind(asked.messages, indexes, int(turns[-1].ids[-1]))
            if len(ids):
                self._say(str(new["role"]), ids)
        before = self._tokens
        return await self._write(asked), before

    def _part(self, asked: Asked) -> None:
        """See that a request goes on from what was said, or go back to where it does. Raises RequestRefused."""
        parting = self._parting(asked)
        if parting is None:
            return
        if not self._goes_back:
            raise RequestRefused("branch", f"{parting.why}: a conversation that parts from itself is not one sample")
        kept = sum(i < parting.message for i, _ in self._turns)
        written = [n for n, turn in enumerate(self._episode.turns, start=1) if turn.role == "assistant"]
        self._back(written[kept - 1] if kept else 0, "taken_back")
        self._turns, self.full, self._last = self._turns[:kept], None, None
        self._messages = self._messages[: self._turns[-1][0] + 1] if kept else []
        if not kept:
            self._rendering = self._first = None

    def _parting(self, asked: Asked) -> Parting | None:
        if self._first is None:
            return None
        return same_setting(self._first, asked) or part(self._messages, asked.messages, [i for i, _ in self._turns])

    # ── tokens ───────────────────────────────────────────────────────────────

    @property
    def _tokens(self) -> int:
        """Tokens of the conversation so far, those of turns to be replayed not counted."""
        turns = self._left[: self._taken] + self._episode.turns[len(self._left) :]
        return len(self._episode.prompt_ids) + sum(len(turn.ids) for turn in turns)

    def _back(self, turns: int, reason: str) -> None:
        """Go back to the first `turns` turns, of either side."""
        self._episode.take_back(turns, reason)
        self._left = self._left[:turns]
        self._taken = min(self._taken, turns)

    async def _begin(self, ids: "TokenIds") -> None:
        if self._left or self._episode.resumed:
            if np.array_equal(ids, self._episode.prompt_ids):
                return
            self._back(0, NOT_REPEATED)
        await self._episode.set_prompt(ids=ids)

    def _say(self, role: str, ids: "TokenIds") -> None:
        if self._taken < len(self._left):
            there = self._left[self._taken]
            if there.role != "assistant" and np.array_equal(there.ids, ids):
                self._taken += 1
                return
        if len(self._episode.turns) == len(self._left):
            self._back(self._taken, NOT_REPEATED)
        self._episode.append(role, ids=ids)

    async def _write(self, asked: Asked) -> Turn:
        if self._taken < len(self._left):
            there = self._left[self._taken]
            if there.role == "assistant":
                self._taken += 1
                return there
            self._back(self._taken, NOT_REPEATED)
        return await self._episode.generate(asked.max_tokens, stop=asked.stop)
