"""OpenAI's chat completions: requests read, answers written, whole or as a stream of events."""

import json
import time
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
from rollout_workers.agents.tools import parsed

_DONE = frozenset(
    {
        "model", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop", "stream",
        "stream_options", "logprobs", "n", "chat_template_kwargs", "parallel_tool_calls", "response_format",
    }
)  # fmt: skip
_OF_THE_TASK = frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"})
"""Sampling for which the task's own parameters are used, whatever a request says."""
_NOTHING = _OF_THE_TASK | {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "verbosity", "top_logprobs",
}  # fmt: skip
_ROLES = {"developer": "system", "function": "tool"}

KEEP_ALIVE = b": the model is writing\n\n"


def read(body: Mapping[str, Any]) -> Asked:
    """The request of a body. Raises RequestRefused."""
    refuse_what_changes_tokens(body, _DONE, nothing=_NOTHING)
    messages = must_be(body.get("messages"), list, "messages")
    if not messages:
        raise RequestRefused("invalid", "messages: there are none")
    choice = body.get("tool_choice") or "auto"
    wanted = {
        "n": body.get("n") not in (None, 1),
        "tool_choice": choice not in ("auto", "none"),
        "parallel_tool_calls": body.get("parallel_tool_calls") is False and bool(body.get("tools")),
        "response_format": field_of(body, "response_format", dict).get("type", "text") != "text",
        "top_logprobs": bool(body.get("top_logprobs")),
    }
    refuse([name for name, is_wanted in wanted.items() if is_wanted])
    return Asked(
        model=str(body.get("model") or ""),
        messages=[_message(message, f"messages[{i}]") for i, message in enumerate(messages)],
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(field_of(body, "tools", list))],
        reads_calls=choice == "auto",
        template=template_of(body),
        max_tokens=positive(body.get("max_completion_tokens") or body.get("max_tokens"), "max_tokens"),
        stop=strings(body.get("stop"), "stop"),
        stream=bool(body.get("stream")),
        with_usage=bool(field_of(body, "stream_options", dict).get("include_usage")),
        with_logprobs=bool(body.get("logprobs")),
    )


def reply(answer: Answer, asked: Asked, episode_id: str) -> dict[str, Any]:
    """The answer as a whole."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content or None, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = _calls(answer)
    choice = {"index": 0, "message": message, "finish_reason": answer.finish, "logprobs": _logprobs(answer, asked)}
    return {**_head(answer, asked, episode_id, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def events(answer: Answer, asked: Asked, episode_id: str) -> Iterator[bytes]:
    """The answer as a stream."""
    head = _head(answer, asked, episode_id, "chat.completion.chunk")

    def chunk(delta: dict[str, Any], finish: str | None = None, logprobs: object = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return _event({**head, "choices": [choice]})

    yield chunk({"role": "assistant", "content": ""})
    if answer.reasoning:
        yield chunk({"reasoning_content": answer.reasoning})
    if answer.content or asked.with_logprobs:
        yield chunk({"content": answer.content}, logprobs=_logprobs(answer, asked))
    for i, call in enumerate(_calls(answer)):
        yield chunk({"tool_calls": [{"index": i, **call}]})
    yield chunk({}, answer.finish)
    if asked.with_usage:
        yield _event({**head, "choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def error(kind: str, code: str, message: str) -> dict[str, Any]:
    """An error as a body."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def error_event(kind: str, code: str, message: str) -> bytes:
    """An error in a stream that has begun."""
    return _event(error(kind, code, message))


def _event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _head(answer: Answer, asked: Asked, episode_id: str, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{episode_id}-{answer.number}",
        "object": kind,
        "created": int(time.time()),
        "model": asked.model,
    }


def _usage(answer: Answer) -> dict[str, int]:
    total = answer.prompt_tokens + answer.completion_tokens
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": total,
    }


def _logprobs(answer: Answer, asked: Asked) -> dict[str, Any] | None:
    if not asked.with_logprobs:
        return None
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in answer.logprobs
    ]
    return {"content": content, "refusal": None}


def _calls(answer: Answer) -> list[Message]:
    return [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in answer.calls
    ]


def _message(given: Any, where: str) -> Message:  # noqa: ANN401 - JSON
    must_be(given, dict, where)
    role = must_be(given.get("role"), str, f"{where}.role")
    message: Message = {"role": _ROLES.get(role, role), "content": text_of(given.get("content"), where)}
    if calls := given.get("tool_calls"):
        message["tool_calls"] = [_call(call, where) for call in must_be(calls, list, f"{where}.tool_calls")]
    for name in ("tool_call_id", "name"):
        if given.get(name) is not None:
            message[name] = must_be(given[name], str, f"{where}.{name}")
    return message


def _call(given: Any, where: str) -> Message:  # noqa: ANN401 - JSON
    function = must_be(must_be(given, dict, where).get("function"), dict, f"{where}.tool_calls: function")
    arguments = must_be(function.get("arguments") or "", str, f"{where}: arguments")
    return call_of(str(given.get("id")), must_be(function.get("name"), str, f"{where}: name"), parsed(arguments))


def _tool(given: Any, where: str) -> dict[str, Any]:  # noqa: ANN401 - JSON
    kind = must_be(given, dict, where).get("type")
    if kind != "function":
        refuse([f"{where} of type {kind}"])
    must_be(given.get("function"), dict, f"{where}.function")
    return {"type": "function", "function": {k: v for k, v in given["function"].items() if k != "strict"}}
