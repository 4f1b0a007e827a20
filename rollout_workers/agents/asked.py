"""Requests of an agent in one form, whichever API it speaks, and what can be wrong with them.

A message is a mapping as chat templates take it: `role` (system, user, assistant, tool), `content` (text), and where
they are given `tool_calls`, `tool_call_id`, `name`. Arguments of a tool call are a parsed object.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, TypeVar

Message: TypeAlias = dict[str, Any]
T = TypeVar("T")


class RequestRefused(Exception):
    """A request that cannot become a part of its sample. `code` is one of the table in docs/agents.md."""

    reason: ClassVar[str] = "request_refused"

    def __init__(self, code: str, why: str) -> None:
        super().__init__(why)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request for a turn of the model."""

    model: str
    """Model's name as the agent gave it: it is answered with, and nothing else."""
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools in OpenAI's form: {"type": "function", "function": {name, description, parameters}}."""
    reads_calls: bool = True
    """False where the model's tool calls are to stay text."""
    template: Mapping[str, Any]
    """Further arguments of the chat template."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    with_usage: bool = False
    """True where a stream of OpenAI's form is to end with the usage."""
    with_logprobs: bool = False


def refuse_what_changes_tokens(body: Mapping[str, Any], done: frozenset[str], *, nothing: frozenset[str]) -> None:
    """Raise RequestRefused for fields that are neither `done`, nor known to change `nothing`, nor left at no value."""
    refuse(sorted(name for name, value in body.items() if name not in done | nothing and value not in _UNSET))


def refuse(asked: Sequence[str]) -> None:
    """Raise RequestRefused where something is asked for that is not done."""
    if asked:
        raise RequestRefused("unsupported", f"not supported: {', '.join(asked)}")


_UNSET: tuple[Any, ...] = (None, False, 0, 0.0, "", [], {})
"""Values that ask for nothing."""


def text_of(content: Any, where: str, *, kinds: Sequence[str] = ("text",)) -> str:  # noqa: ANN401 - JSON
    """Text of a message's content: a string, or parts of text, joined by newlines. Raises RequestRefused."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestRefused("invalid", f"{where}: its content is a {type(content).__name__}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in kinds:
            raise RequestRefused("unsupported", f"{where}: content of type {kind} is not supported")
        must_be(part.get("text"), str, f"{where}: text")
        texts.append(part["text"])
    return "\n".join(texts)


def call_of(call_id: str, name: str, arguments: Any) -> Message:  # noqa: ANN401 - JSON
    """A tool call of an assistant's message, with its arguments parsed."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def positive(value: Any, name: str) -> int | None:  # noqa: ANN401 - JSON
    """A count of at least 1, or None where there is none. Raises RequestRefused."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RequestRefused("invalid", f"{name}: {value!r} is not at least 1")
    return value


def strings(value: Any, name: str) -> tuple[str, ...]:  # noqa: ANN401 - JSON
    """One string or several, none of them empty. Raises RequestRefused."""
    found = [value] if isinstance(value, str) else value or []
    if not isinstance(found, list) or not all(isinstance(each, str) and each for each in found):
        raise RequestRefused("invalid", f"{name}: {value!r} is neither a string nor a list of strings")
    return tuple(found)


def template_of(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Variables of the chat template; not what decides what is written, and how. Raises RequestRefused."""
    found: Mapping[str, Any] = field_of(body, "chat_template_kwargs", dict)
    refuse([f"chat_template_kwargs.{name}" for name in sorted(found.keys() & _RENDERING)])
    return found


_RENDERING = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages",
        "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs",
        "tools", "truncation",
    }
)  # fmt: skip
"""Parameters of apply_chat_template. A template of the request's own is a program, which may never end."""


def field_of(body: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """Value of a field, an empty one where it asks for nothing. Raises RequestRefused for one of another kind."""
    value: T = must_be(body[name], kind, name) if body.get(name) else kind()
    return value


def must_be(value: Any, kind: type, name: str) -> Any:  # noqa: ANN401 - JSON
    """The value, which is of this kind. Raises RequestRefused."""
    if not isinstance(value, kind):
        raise RequestRefused("invalid", f"{name}: {type(value).__name__} where {kind.__name__} is expected")
    return value
