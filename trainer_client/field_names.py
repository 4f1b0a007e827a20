"""Misspelt names of options and fields: errors that name the nearest known one."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Self

from buffer_wire.errors import InvalidField


def check_names(owner: str, known: Iterable[str], given: Mapping[str, object]) -> None:
    """Raise InvalidField for the first name that is not among `known`; the error names the closest one of them."""
    fields = list(known)
    for name, value in given.items():
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            hint = f" ({close[0]} is close)" if close else ""
            raise InvalidField(f"{owner}.{name}", value, f"one of its fields{hint}")


class NamedFields:
    """Base of dataclasses that raises InvalidField for an unknown keyword and names the closest field.

    Python's own TypeError neither names the closest field nor is among the errors that a trainer catches.
    """

    __slots__ = ()
    __dataclass_fields__: dict[str, Any]

    def __new__(cls, *_: object, **given: object) -> Self:
        """Check the keywords' names; the dataclass takes their values."""
        if not given.keys() <= cls.__dataclass_fields__.keys():
            check_names(cls.__name__, cls.__dataclass_fields__, given)
        return object.__new__(cls)
