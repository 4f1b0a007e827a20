"""A conversation as the model's chat template writes it, token by token.

Turns that the model wrote are never tokenized again. Where the template would write one, it is given a mark; what it
writes behind the last mark is tokenized and put behind the tokens that are there.

Invariant: what the template writes between two turns is what it wrote there before. One that rewrites what was said
already (a date, tools that move to the last question) is found out, with the place.
"""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollout_workers.agents.asked import Message, RequestRefused
from rollout_workers.generation.prompts import Tokenizer
from rollout_workers.generation.samples import TokenIds

_AROUND = 40
"""Characters shown of a place where two texts differ."""


class Rendering:
    """Template and tools of one conversation, and what was written so far."""

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]], template: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._tools = list(tools) or None
        self._template = dict(template)
        self._mark = secrets.token_hex(8)
        self._said: list[str] = []
        """Text that the template wrote before each turn of the model, without what begins that turn."""

    async def prompt(self, messages: Sequence[Message]) -> TokenIds:
        """Token ids of the messages before the first turn, and of what begins it, int32 [p]. Raises RequestRefused."""
        said, text = await asyncio.to_thread(lambda: [self._written(messages, begin=b) for b in (False, True)])
        self._said = [said]
        return self._tokens(text)

    async def behind(self, messages: Sequence[Message], turns: Sequence[int], last_id: int) -> TokenIds:
        """Token ids that the template puts behind the last turn of the model, to the beginning of the next, int32 [n].

        `turns`: indexes of the messages that the model wrote; `last_id`: the last token of the last of them, which is
        left out where the template writes it too. Raises RequestRefused.
        """
        return await asyncio.to_thread(self._behind, messages, turns, last_id)

    def _behind(self, messages: Sequence[Message], turns: Sequence[int], last_id: int) -> TokenIds:
        with_calls = False
        try:
            said, pieces = self._pieces(messages, turns, with_calls=False)
        except RequestRefused:
            # Some templates want the calls before their results.
            if not any(messages[i].get("tool_calls") for i in turns):
                raise
            with_calls = True
            said, pieces = self._pieces(messages, turns, with_calls=True)
        for turn, (before, now) in enumerate(zip(self._said[: len(turns)], said, strict=False)):
            if not now.startswith(before):
                raise RequestRefused(
                    "drift", f"before turn {turn} of the model the chat template {_place(before, now)}"
                )
        self._said = [*self._said[: len(turns)], said[-1]]
        ids = self._tokens(pieces[-1])
        if with_calls and messages[turns[-1]].get("tool_calls"):
            # The calls are written behind the mark, and the model has written them itself.
            end = np.flatnonzero(ids == last_id)
            if not len(end):
                raise RequestRefused("template", "the chat template does not end a turn with calls as the model did")
            return ids[end[0] + 1 :]
        return ids[1:] if len(ids) and ids[0] == last_id else ids

    def _pieces(
        self, messages: Sequence[Message], turns: Sequence[int], *, with_calls: bool
    ) -> tuple[list[str], list[str]]:
        """Text that the template writes around the model's turns: without, and with the beginning of the next."""
        marked = list(messages)
        for i in turns:
            marked[i] = {"role": "assistant", "content": f"{self._mark}.{i}."}
            if with_calls and (calls := messages[i].get("tool_calls")):
                marked[i]["tool_calls"] = calls
        both = []
        for begin in (False, True):
            rest, pieces = self._written(marked, begin=begin), []
            for i in turns:
                piece, found, rest = rest.partition(f"{self._mark}.{i}.")
                if not found:
                    raise RequestRefused("template", f"the chat template leaves message {i} out, which the model wrote")
                pieces.append(piece)
            both.append([*pieces, rest])
        return both[0], both[1]

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


def difference(first: str, second: str) -> int:
    """Index of the first character in which two texts differ; the length of the shorter where it begins the other."""
    same = min(len(first), len(second))
    return next((i for i in range(same) if first[i] != second[i]), same)
