"""Enums of the wire by word: `OVERFLOW_ACTION_DROP_OLDEST` is "drop_oldest". The value of nothing has no word."""

from collections.abc import Iterable
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from google.protobuf.internal.enum_type_wrapper import _EnumTypeWrapper

_Member = TypeVar("_Member", bound=StrEnum)
_Number = TypeVar("_Number", bound=int)


def words(enum: "_EnumTypeWrapper[_Number]") -> dict[str, _Number]:
    """Number of each word."""
    (nothing, _), *values = enum.items()
    prefix = nothing.removesuffix("UNSPECIFIED")
    return {name.removeprefix(prefix).lower(): number for name, number in values}


def word(enum: "_EnumTypeWrapper[_Number]", number: int) -> str:
    """Word of a number; "unspecified" for that of nothing. Raises ValueError for one that the enum does not have."""
    prefix = enum.items()[0][0].removesuffix("UNSPECIFIED")
    return enum.Name(number).removeprefix(prefix).lower()  # type: ignore[arg-type]


def numbers(enum: "_EnumTypeWrapper[_Number]", members: Iterable[_Member]) -> dict[_Member, _Number]:
    """Number of each member of an enum of Python. Raises KeyError for one that the wire has no word for."""
    numbered = words(enum)
    return {member: numbered[member.value] for member in members}


def members(enum: "_EnumTypeWrapper[_Number]", kind: type[_Member]) -> dict[_Number, _Member]:
    """Member of each number. Raises KeyError or ValueError where the two enums have different words."""
    numbers(enum, kind)
    return {number: kind(word) for word, number in words(enum).items()}
