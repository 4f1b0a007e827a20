"""Messages made of values that have fields of the same names, and the values of such messages.

None is a field that is not set, a word is the enum's number of that name, a dataclass is a message, and so back. A
message may be there as its bytes too; empty ones are none.
"""

from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from types import NoneType
from typing import Any, TypeAlias, TypeVar, get_args, get_origin

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from buffer_wire.enums import words

MessageT = TypeVar("MessageT", bound=Message)
ValueT = TypeVar("ValueT")

Field: TypeAlias = Any
"""Descriptor of a field, whose class depends on the implementation of protobuf."""


def message_of(kind: type[MessageT], value: object, **given: Any) -> MessageT:  # noqa: ANN401 - of any field's type
    """The message of a value; `given` are fields that the value lacks, or has in another form.

    Raises AttributeError for a field of the message that the value lacks and that is not given.
    """
    unlike = [field for field in kind.DESCRIPTOR.fields if field.name not in given]
    return kind(**{field.name: _to_wire(field, getattr(value, field.name)) for field in unlike}, **given)


def value_of(kind: type[ValueT], message: Message, **given: Any) -> ValueT:  # noqa: ANN401 - of any field's type
    """The value of a message; `given` are fields that the message lacks, or has in another form.

    What neither of them has keeps its default.
    """
    described = message.DESCRIPTOR.fields_by_name
    alike = [one for one in fields(kind) if one.name in described and one.name not in given]  # type: ignore[arg-type]
    return kind(**{one.name: _of_wire(described[one.name], message, one.type) for one in alike}, **given)


def _to_wire(field: Field, value: Any) -> Any:  # noqa: ANN401 - of any field's type
    if value is None:
        return None
    if field.message_type is not None:
        kind = GetMessageClass(field.message_type)
        if isinstance(value, bytes):
            return kind.FromString(value) if value else None
        return [message_of(kind, one) for one in value] if isinstance(value, list | tuple) else message_of(kind, value)
    if field.enum_type is not None:
        numbers = _numbers(field)
        return [numbers[one] for one in value] if isinstance(value, list | tuple) else numbers[value]
    return value


def _of_wire(field: Field, message: Message, hint: Any) -> Any:  # noqa: ANN401
    value = getattr(message, field.name)
    if NoneType in get_args(hint):
        if not message.HasField(field.name):
            return None
        hint = next(one for one in get_args(hint) if one is not NoneType)
    if field.message_type is None:
        if field.enum_type is not None:
            return _words(field)[value]
        return value if isinstance(value, str | bytes | int | float) else tuple(value)
    if isinstance(value, Message):
        return value_of(hint, value)
    values = (value_of(get_args(hint)[0], one) for one in value)
    return tuple(values) if get_origin(hint) is tuple else list(values)


@lru_cache
def _numbers(field: Field) -> Mapping[str, int]:
    return words(EnumTypeWrapper(field.enum_type))


@lru_cache
def _words(field: Field) -> Mapping[int, str]:
    return {number: word for word, number in _numbers(field).items()}
