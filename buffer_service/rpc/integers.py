"""The bound of every integer of a request: what a double holds exactly, since the store computes with doubles.

Only fields of 64 bits can break it, so only these are looked at, wherever they are in a message. Many fields have a
tighter bound, which whoever converts the message checks. Groups are left out: validate.check_group bounds theirs.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from buffer_wire.errors import InvalidField
from buffer_wire.limits import MAX_INTEGER
from rollout_buffer.v1 import groups_pb2

_WIDE = frozenset({FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64})


@dataclass(frozen=True, slots=True)
class _Plan:
    """The names of the fields to look at in messages of one type."""

    integers: tuple[str, ...]
    messages: tuple[str, ...]


@cache
def _plan(kind: Descriptor) -> _Plan:
    integers = [one.name for one in kind.fields if one.cpp_type in _WIDE]
    messages = [one.name for one in kind.fields if one.message_type and _is_wide(one.message_type)]
    return _Plan(tuple(integers), tuple(messages))


def _is_wide(kind: Descriptor) -> bool:
    """True when a message of the type can hold integers of 64 bits. No type of a request holds itself."""
    if kind is groups_pb2.Group.DESCRIPTOR:
        return False
    plan = _plan(kind)
    return bool(plan.integers or plan.messages)


def check(request: Message) -> None:
    """Raises InvalidField for the first integer that is out of bounds."""
    found = _out_of_bounds(request)
    if found is not None:
        raise InvalidField(found[0].removeprefix("."), found[1], f"at most 2^53 - 1 ({MAX_INTEGER}) in size")


def _out_of_bounds(message: Message) -> tuple[str, int] | None:
    """The path below the message, which is only made for the one that is refused, and the value."""
    plan = _plan(message.DESCRIPTOR)
    for name in plan.integers:
        value: Any = getattr(message, name)
        if isinstance(value, int):
            if not -MAX_INTEGER <= value <= MAX_INTEGER:
                return f".{name}", value
        else:
            for i, one in enumerate(value):
                if not -MAX_INTEGER <= one <= MAX_INTEGER:
                    return f".{name}[{i}]", one
    for name in plan.messages:
        value = getattr(message, name)
        if isinstance(value, Message):
            if message.HasField(name) and (found := _out_of_bounds(value)):
                return f".{name}{found[0]}", found[1]
        else:
            for i, one in enumerate(value):
                if found := _out_of_bounds(one):
                    return f".{name}[{i}]{found[0]}", found[1]
    return None
