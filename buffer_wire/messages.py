"""Messages made of values that have fields of the same names, and the values of such messages.

None is a field that is not set, a word is the enum's number of that name, a dataclass is a message, and so back. A
message may be there as its bytes too; empty ones are none. How the fields of a kind are converted is found out once.
"""

from collections.abc import Callable
from dataclasses import fields
from functools import cache, partial
from types import NoneType
from typing import Any, TypeAlias, TypeVar, get_args, get_origin

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from buffer_wire.enums import word, words

MessageT = TypeVar("MessageT", bound=Message)
ValueT = TypeVar("ValueT")

Field: TypeAlias = Any
"""Descriptor of a field, whose class depends on the implementation of protobuf."""

Convert: TypeAlias = Callable[[Any], Any]


def message_of(kind: type[MessageT], value: object, **given: Any) -> MessageT:  # noqa: ANN401 - of any field's type
    """The message of a value; `given` are fields that the value lacks, or has in another form.

    Raises AttributeError for a field of the message that the value lacks and that is not given.
    """
    for name, convert in _to_wire(kind):  # type: ignore[arg-type]  # Classes of messages do hash.
        if name not in given:
            one = getattr(value, name)
            given[name] = one if convert is None or one is None else convert(one)
    return kind(**given)


def value_of(kind: type[ValueT], message: Message, **given: Any) -> ValueT:  # noqa: ANN401 - of any field's type
    """The value of a message; `given` are fields that the message lacks, or has in another form.

    What neither of them has keeps its default.
    """
    for name, is_optional, convert in _of_wire(kind, type(message)):  # type: ignore[arg-type]
        if name not in given:
            if is_optional and not message.HasField(name):
                given[name] = None
            else:
                one = getattr(message, name)
                given[name] = one if convert is None else convert(one)
    return kind(**given)


@cache
def _to_wire(kind: Any) -> list[tuple[str, Convert | None]]:  # noqa: ANN401 - a class
    """Names of a message's fields, each with the conversion of what the value has there, if it needs one."""
    return [(field.name, _field_to_wire(field)) for field in kind.DESCRIPTOR.fields]


def _field_to_wire(field: Field) -> Convert | None:
    if field.message_type is not None:
        kind = GetMessageClass(field.message_type)

        def message(value: Any) -> Any:  # noqa: ANN401 - of any field's type
            if isinstance(value, bytes):
                return kind.FromString(value) if value else None
            if isinstance(value, list | tuple):
                return [message_of(kind, one) for one in value]
            return message_of(kind, value)

        return message
    if field.enum_type is not None:
        numbers = words(EnumTypeWrapper(field.enum_type))
        return lambda value: [numbers[one] for one in value] if isinstance(value, list | tuple) else numbers[value]
    return None


@cache
def _of_wire(kind: Any, message: Any) -> list[tuple[str, bool, Convert | None]]:  # noqa: ANN401
    """Names of the fields that a value has of a message; whether each may be None; its conversion, if it needs one."""
    described = message.DESCRIPTOR.fields_by_name
    alike = [one for one in fields(kind) if one.name in described]
    return [(one.name, NoneType in get_args(one.type), _field_of_wire(described[one.name], one.type)) for one in alike]


def _field_of_wire(field: Field, hint: Any) -> Convert | None:  # noqa: ANN401
    if NoneType in get_args(hint):
        hint = next(one for one in get_args(hint) if one is not NoneType)
    if field.message_type is None:
        if field.enum_type is not None:
            return partial(word, EnumTypeWrapper(field.enum_type))
        return None if get_origin(hint) is None else tuple
    if get_origin(hint) is None:
        return lambda value: value_of(hint, value)
    many, element = tuple if get_origin(hint) is tuple else list, get_args(hint)[0]
    return lambda values: many([value_of(element, one) for one in values])
