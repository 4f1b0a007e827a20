"""Two conversations side by side: whether a request goes on from what was said, and where it parts from it."""

from collections.abc import Sequence
from dataclasses import dataclass

from rollout_workers.agents.asked import Asked, Message
from rollout_workers.agents.rendering import difference

_SHOWN = 40
"""Characters shown of a message that is not what it was."""


@dataclass(frozen=True, slots=True)
class Parting:
    """Place where a request parts from what was said."""

    message: int
    """Index of the first message that is another one."""
    why: str


def same_setting(first: Asked, asked: Asked) -> Parting | None:
    """Parting of a request whose tools or template are not those of the first one; None where they are."""
    if list(asked.tools) != list(first.tools):
        return Parting(0, "its tools are not those of the conversation's first request")
    if dict(asked.template) != dict(first.template):
        return Parting(0, "its chat_template_kwargs are not those of the conversation's first request")
    return None


def part(said: Sequence[Message], asked: Sequence[Message], written: Sequence[int]) -> Parting | None:
    """Parting of a request from what was said; None where it goes on from it. `written`: indexes of what the model
    wrote.
    """
    for i, (before, now) in enumerate(zip(said, asked, strict=False)):
        if wrong := _unlike(before, now, written=i in written):
            return Parting(i, f"message {i} ({before['role']}) {wrong}")
    if len(asked) <= len(said):
        end = len(asked)
        return Parting(end, f"it has {end} messages and ends where the conversation has {len(said)}")
    return None


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
