"""Tool calls in what a model writes: parsers by name."""

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

from rollout_workers.engine.errors import EngineRejected
from rollout_workers.engine.http import HttpConnection

SGLANG = "sglang:"
"""Before the name of a parser that is SGLang's own, asked over HTTP."""

Calls: TypeAlias = list[tuple[str, Any]]
"""Tool calls: name and arguments, parsed where they are JSON."""

Parser: TypeAlias = Callable[[str, Sequence[Mapping[str, Any]], str], Awaitable[tuple[str, Calls]]]
"""Text without calls, and the calls. Given are the turn's text, the request's tools and the engine's address."""

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_PARSE_S = 30.0


def parser_of(name: str) -> Parser:
    """The parser `hermes`, or SGLang's `sglang:NAME`."""
    return _of_sglang(name.removeprefix(SGLANG)) if name.startswith(SGLANG) else hermes


async def hermes(text: str, tools: Sequence[Mapping[str, Any]], engine: str) -> tuple[str, Calls]:  # noqa: ARG001 - a Parser
    """Calls as Hermes, Qwen 2.5 and Qwen 3 write them: <tool_call>{"name": …, "arguments": {…}}</tool_call>.

    Where one cannot be read, all stays text: the agent sees what the model wrote.
    """
    try:
        written = [json.loads(call) for call in _CALL.findall(text)]
        calls = [(str(call["name"]), call.get("arguments", {})) for call in written]
    except (ValueError, KeyError, TypeError, AttributeError):
        return text, []
    return _CALL.sub("", text).strip() if calls else text, calls


def parsed(arguments: str) -> Any:  # noqa: ANN401 - JSON
    """Arguments of a call that came as JSON; text that is none stays text."""
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments


def _of_sglang(name: str) -> Parser:
    async def parse(text: str, tools: Sequence[Mapping[str, Any]], engine: str) -> tuple[str, Calls]:
        doing, http = "reading tool calls", HttpConnection(engine)
        body = {"text": text, "tools": list(tools), "tool_call_parser": name}
        try:
            reply = await http.call(
                "POST", "/parse_function_call", body, doing=doing, deadline_s=_PARSE_S, repeatable=True
            )
        finally:
            await http.close()
        if reply.status != 200:
            raise EngineRejected(engine, doing, reply.status, reply.message)
        return reply.body["normal_text"], [(call["name"], parsed(call["parameters"])) for call in reply.body["calls"]]

    return parse
