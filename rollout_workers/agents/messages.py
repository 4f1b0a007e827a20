"""Anthropic's messages: requests read, answers written, whole or as a stream of events."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rollout_workers.agents.answers import Answer
from rollout_workers.agents.asked import (
    Asked,
    Message,
    RequestRefused,
    call_of,
    field_of,
    must_be,
    positive,
    refuse,
    refuse_what_changes_tokens,
    strings,
    template_of,
    text_of,
)

_DONE = frozenset(
    {
        "model", "messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream", "thinking",
        "chat_template_kwargs",
    }
)  # fmt: skip
_NOTHING = frozenset({"temperature", "top_p", "top_k", "metadata", "service_tier", "betas"})
"""Fields that change no token, and sampling for which the task's own parameters are used."""
_STOPS = {"length": "max_tokens", "tool_calls": "tool_use"}

KEEP_ALIVE = b'event: ping\ndata: {"type": "ping"}\n\n'


def read(body: Mapping[str, Any]) -> Asked:
    """The request of a body. Raises RequestRefused."""
    refuse_what_changes_tokens(body, _DONE, nothing=_NOTHING)
    choice = field_of(body, "tool_choice", dict) or {"type": "auto"}
    wanted = {
        "thinking": field_of(body, "thinking", dict).get("type", "disabled") != "disabled",
        "tool_choice": choice.get("type") not in ("auto", "none"),
        "disable_parallel_tool_use": bool(choice.get("disable_parallel_tool_use")),
    }
    refuse([name for name, is_wanted in wanted.items() if is_wanted])
    messages: list[Message] = []
    if system := text_of(body.get("system"), "system"):
        messages.append({"role": "system", "content": system})
    for i, message in enumerate(must_be(body.get("messages"), list, "messages")):
        messages += _messages(message, f"messages[{i}]")
    if not messages:
        raise RequestRefused("invalid", "messages: there are none")
    return Asked(
        model=str(body.get("model") or ""),
        messages=messages,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(field_of(body, "tools", list))],
        reads_calls=choice.get("type") == "auto",
        template=template_of(body),
        max_tokens=positive(body.get("max_tokens"), "max_tokens"),
        stop=strings(body.get("stop_sequences"), "stop_sequences"),
        stream=bool(body.get("stream")),
    )


def reply(answer: Answer, asked: Asked, episode_id: str) -> dict[str, Any]:
    """The answer as a whole."""
    return {
        **_head(answer, asked, episode_id),
        "content": _blocks(answer),
        "stop_reason": _stop_reason(answer),
        "stop_sequence": answer.stop_string,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens},
    }


def events(answer: Answer, asked: Asked, episode_id: str) -> Iterator[bytes]:
    """The answer as a stream."""
    usage = {"input_tokens": answer.prompt_tokens, "output_tokens": 0}
    begun = {**_head(answer, asked, episode_id), "content": [], "stop_reason": None, "stop_sequence": None}
    yield _event({"type": "message_start", "message": {**begun, "usage": usage}})
    for i, block in enumerate(_blocks(answer)):
        start, deltas = _parts(block)
        yield _event({"type": "content_block_start", "index": i, "content_block": start})
        for delta in deltas:
            yield _event({"type": "content_block_delta", "index": i, "delta": delta})
        yield _event({"type": "content_block_stop", "index": i})
    end = {"stop_reason": _stop_reason(answer), "stop_sequence": answer.stop_string}
    yield _event({"type": "message_delta", "delta": end, "usage": {"output_tokens": answer.completion_tokens}})
    yield _event({"type": "message_stop"})


def error(kind: str, code: str, message: str) -> dict[str, Any]:
    """An error as a body."""
    return {"type": "error", "error": {"type": kind, "message": f"{message} ({code})"}}


def error_event(kind: str, code: str, message: str) -> bytes:
    """An error in a stream that has begun."""
    return _event(error(kind, code, message))


def _event(value: dict[str, Any]) -> bytes:
    return f"event: {value['type']}\ndata: {json.dumps(value)}\n\n".encode()


def _head(answer: Answer, asked: Asked, episode_id: str) -> dict[str, Any]:
    return {
        "id": f"msg_{episode_id}_{answer.number}",
        "type": "message",
        "role": "assistant",
        "model": asked.model,
    }


def _stop_reason(answer: Answer) -> str:
    return _STOPS.get(answer.finish, "end_turn" if answer.stop_string is None else "stop_sequence")


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.content:
        blocks.append({"type": "text", "text": answer.content})
    for call in answer.calls:
        made = call["function"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": made["name"], "input": made["arguments"]})
    return blocks


def _parts(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Beginning of a block, and what is added to it."""
    if block["type"] == "text":
        return {"type": "text", "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        said = {"type": "thinking_delta", "thinking": block["thinking"]}
        return {**block, "thinking": ""}, [said, {"type": "signature_delta", "signature": ""}]
    given = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    return {**block, "input": {}}, [given]


def _messages(given: Any, where: str) -> Iterator[Message]:  # noqa: ANN401 - JSON
    """A message as those of a chat template: each tool's result is one of its own."""
    role = must_be(must_be(given, dict, where).get("role"), str, f"{where}.role")
    content = given.get("content")
    if not isinstance(content, list):
        yield {"role": role, "content": text_of(content, where)}
        return
    kinds = [must_be(must_be(block, dict, where).get("type"), str, f"{where}: type") for block in content]
    if role == "assistant":
        text = text_of([b for b in content if b["type"] not in {"tool_use", "thinking", "redacted_thinking"}], where)
        calls = [
            call_of(str(b.get("id")), str(b.get("name")), b.get("input")) for b in content if b["type"] == "tool_use"
        ]
        yield {"role": role, "content": text, **({"tool_calls": calls} if calls else {})}
        return
    for block in content:
        if block["type"] == "tool_result":
            told = text_of(block.get("content"), where)
            yield {"role": "tool", "content": told, "tool_call_id": str(block.get("tool_use_id"))}
    if any(kind != "tool_result" for kind in kinds):
        yield {"role": role, "content": text_of([b for b in content if b["type"] != "tool_result"], where)}


def _tool(given: Any, where: str) -> dict[str, Any]:  # noqa: ANN401 - JSON
    kind = must_be(given, dict, where).get("type") or "custom"
    if kind != "custom":
        refuse([f"{where} of type {kind}"])
    function = {
        "name": must_be(given.get("name"), str, f"{where}.name"),
        "description": given.get("description") or "",
        "parameters": must_be(given.get("input_schema") or {}, dict, f"{where}.input_schema"),
    }
    return {"type": "function", "function": function}
