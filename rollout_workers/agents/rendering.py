"""A conversation as the model's chat template writes it, token by token.

Turns that the model wrote are never tokenized again. Where the template would write one, it is given a mark; what it
writes behind the last mark is tokenized and put behind the tokens that are there.

Invariants: what the template writes between two turns is what it wrote there before; all that was said is written. A
template that rewrites (a date, tools that move to the last question) or leaves something out is refused with the place.
"""

import asyncio
import secrets
from bisect import bisect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollout_workers.agents.asked import Message, RequestRefused
from rollout_workers.generation.prompts import Tokenizer
from rollout_workers.generation.sample import TokenIds

_AROUND = 40
"""Characters shown of a place where two texts differ."""


class Rendering:
    """Template and tools of one conversation, and what was written so far."""

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]], template: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._tools = list(tools) or None
        self._template = dict(template)
        self._secret = secrets.token_hex(8)
        """Beginning of marks, which nobody can have said."""
        self._said: list[str] = []
        """Text that the template wrote before each turn of the model, without what begins that turn."""
        self._with_calls: bool | None = None
        """True where the template needs the calls before their results; None while there were none."""

    async def prompt(self, messages: Sequence[Message]) -> TokenIds:
        """Token ids of the messages before the first turn, and of what begins it, int32 [p]. Raises RequestRefused."""
        return await asyncio.to_thread(self._prompt, messages)

    def _prompt(self, messages: Sequence[Message]) -> TokenIds:
        plain, text = (self._written(messages, begin=begin) for begin in (False, True))
        self._said = [_common(plain, text)]
        return self._tokens(text)

    async def behind(self, messages: Sequence[Message], turns: Sequence[int], last_id: int) -> TokenIds:
        """Token ids that the template puts behind the last turn of the model, to the beginning of the next, int32 [n].

        `turns`: indexes of the messages that the model wrote; `last_id`: the last token of the last of them, which is
        left out where the template writes it too. Raises RequestRefused.
        """
        return await asyncio.to_thread(self._behind, messages, turns, last_id)

    def _behind(self, messages: Sequence[Message], turns: Sequence[int], last_id: int) -> TokenIds:
        has_calls = any(messages[i].get("tool_calls") for i in turns)
        ways = [False] if not has_calls else [False, True] if self._with_calls is None else [self._with_calls]
        refusals = []
        for with_calls in ways:
            try:
                said, text = self._last_piece(messages, turns, with_calls=with_calls)
                ids = self._rest(text, last_id, calls=with_calls and bool(messages[turns[-1]].get("tool_calls")))
            except RequestRefused as refused:
                refusals.append(refused)
            else:
                self._with_calls = with_calls if has_calls else None
                self._said = [*self._said[: len(turns)], said]
                return ids
        raise refusals[0]

    def _last_piece(self, messages: Sequence[Message], turns: Sequence[int], *, with_calls: bool) -> tuple[str, str]:
        """Text that the template writes behind the last turn: without, and with the beginning of the next.

        Raises RequestRefused, also where it writes something else before that turn than it did, or leaves out what was
        said since.
        """
        new = range(turns[-1] + 1, len(messages))
        marked = list(messages)
        for i in turns:
            marked[i] = {"role": "assistant", "content": self._mark(i)}
            if with_calls and (calls := messages[i].get("tool_calls")):
                marked[i]["tool_calls"] = calls
        pieces, plain = (self._pieces(marked, turns, begin=begin) for begin in (True, False))
        for turn, (before, now) in enumerate(zip(self._said[: len(turns)], pieces, strict=False)):
            if not now.startswith(before):
                why = f"before turn {turn} of the model the chat template {_place(before, now)}"
                raise RequestRefused("drift", why)
        for i in new:
            marked[i] = {**messages[i], "content": self._mark(i)}
        shown = self._pieces(marked, turns, begin=False)[-1]
        if lost := [i for i in new if messages[i]["content"] and self._mark(i) not in shown]:
            raise RequestRefused("template", f"the chat template leaves message {lost[0]} out")
        return _common(plain[-1], pieces[-1]), pieces[-1]

    def _pieces(self, marked: Sequence[Message], turns: Sequence[int], *, begin: bool) -> list[str]:
        """Text before, between and behind the marks of the model's turns."""
        rest, pieces = self._written(marked, begin=begin), []
        for i in turns:
            piece, found, rest = rest.partition(self._mark(i))
            if not found:
                raise RequestRefused("template", f"the chat template leaves message {i} out, which the model wrote")
            pieces.append(piece)
        return [*pieces, rest]

    def _rest(self, text: str, last_id: int, *, calls: bool) -> TokenIds:
        """Tokens behind the model's last one. `calls`: the text begins with its calls, which it has written itself."""
        ids = self._tokens(text)
        if not calls:
            return ids[1:] if len(ids) and ids[0] == last_id else ids
        end = np.flatnonzero(ids == last_id)
        if not len(end):
            raise RequestRefused("template", "the chat template does not end a turn with calls as the model did")
        return ids[end[0] + 1 :]

    def _mark(self, index: int) -> str:
        return f"{self._secret}.{index}."

    def _written(self, messages: Sequence[Message], *, begin: bool) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=begin,
                return_dict=False,
                tools=self._tools,
                **self._template,
            )
        except Exception as error:  # A template is a program of the model's author: it may raise anything.
            raise RequestRefused("template", f"the chat template refuses the messages: {error}") from error
        if not isinstance(text, str):
            raise RequestRefused("template", f"the chat template made a {type(text).__name__}")
        return text

    def _tokens(self, text: str) -> TokenIds:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), np.int32)


def _place(before: str, now: str) -> str:
    at = difference(before, now)
    return (
        f"wrote {before[at : at + _AROUND]!r} at character {at}, where it now writes {now[at : at + _AROUND]!r}: "
        "what was said already cannot be rewritten"
    )


def _common(first: str, second: str) -> str:
    """Text with which both begin."""
    return first[: difference(first, second)]


def difference(first: str, second: str) -> int:
    """Index of the first character in which two texts differ; the length of the shorter where it begins the other."""
    # Slices are compared far faster than characters, and the texts are whole conversations.
    return bisect(range(1, min(len(first), len(second)) + 1), 0, key=lambda n: first[:n] != second[:n])
