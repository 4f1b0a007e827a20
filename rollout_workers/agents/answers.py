"""Answers of the model: a turn's tokens read as reasoning, text and tool calls.

What is read here goes to the agent. It never goes back into tokens: a sample keeps those that were generated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rollout_workers.agents.asked import Asked, Message, call_of
from rollout_workers.agents.tools import SGLANG, Calls, parser_of
from rollout_workers.episode import Turn
from rollout_workers.generation.prompts import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A turn of the model, as the agent is told it."""

    number: int
    """Number of the turn among the conversation's, from 0."""
    content: str
    reasoning: str
    calls: Sequence[Message]
    finish: Literal["stop", "length", "tool_calls"]
    stop_string: str | None
    """The stop string of the request that ended it, which is not in `content`."""
    prompt_tokens: int
    completion_tokens: int
    logprobs: Sequence[tuple[str, float]]
    """Text and log-probability of each token, stop token included; empty unless they are asked for."""

    @property
    def message(self) -> Message:
        """The answer as a message of the conversation."""
        calls = {"tool_calls": list(self.calls)} if self.calls else {}
        return {"role": "assistant", "content": self.content, **calls}


class Reader:
    """Reads turns. `tool_parser`: "", "hermes" or "sglang:NAME"; `reasoning`: "" or "think"."""

    def __init__(self, tool_parser: str, reasoning: str) -> None:
        self.reads_tools = bool(tool_parser)
        self._parse = parser_of(tool_parser)
        self._with_special = tool_parser.startswith(SGLANG)
        """True where the parser may look for special tokens."""
        self._reasoning = reasoning

    async def read(
        self, turn: Turn, asked: Asked, tokenizer: Tokenizer, *, number: int, prompt_tokens: int, engine: str
    ) -> Answer:
        """The answer of a turn. `prompt_tokens`: tokens before it. Raises EngineError where SGLang cannot be asked."""
        text, stop_string = _before_stop(turn.text, asked.stop, stopped=turn.finish_reason == "stop")
        reads_calls = bool(asked.tools) and asked.reads_calls
        if reads_calls and self._with_special and stop_string is None:
            text = tokenizer.decode(_without_end(turn, tokenizer), skip_special_tokens=False)
        reasoning, text = _think(text) if self._reasoning else ("", text)
        calls: Calls = []
        if reads_calls:
            rest, calls = await self._parse(text, asked.tools, engine)
            if all(isinstance(arguments, dict) for _, arguments in calls):
                text = rest
            else:
                calls = []
        said = [call_of(f"call{number:03d}{i:02d}", name, given) for i, (name, given) in enumerate(calls)]
        return Answer(
            number=number,
            content=text,
            reasoning=reasoning,
            calls=said,
            finish="length" if turn.finish_reason == "length" else "tool_calls" if said else "stop",
            stop_string=stop_string,
            prompt_tokens=prompt_tokens,
            completion_tokens=len(turn.ids),
            logprobs=_logprobs(turn, tokenizer) if asked.with_logprobs else (),
        )


def _think(text: str) -> tuple[str, str]:
    """Reasoning and text. The opening tag may have been the template's; without a closing one all is reasoning."""
    inside, end, behind = text.partition("</think>")
    if not end and not inside.lstrip().startswith("<think>"):
        return "", text
    return inside.lstrip().removeprefix("<think>").strip(), behind.lstrip()


def _before_stop(text: str, stop: Sequence[str], *, stopped: bool) -> tuple[str, str | None]:
    """The text before the first stop string, and which it is."""
    found = [(at, string) for string in stop if (at := text.find(string)) >= 0] if stopped else []
    if not found:
        return text, None
    at, string = min(found)
    return text[:at], string


def _without_end(turn: Turn, tokenizer: Tokenizer) -> list[int]:
    """The turn's ids without the stop token, which says nothing."""
    ids: list[int] = turn.ids.tolist()
    ends = turn.finish_reason == "stop" and not tokenizer.decode(ids[-1:], skip_special_tokens=True)
    return ids[:-1] if ends else ids


def _logprobs(turn: Turn, tokenizer: Tokenizer) -> list[tuple[str, float]]:
    texts = [tokenizer.decode([token], skip_special_tokens=False) for token in turn.ids.tolist()]
    return list(zip(texts, turn.logprobs.tolist(), strict=True))
