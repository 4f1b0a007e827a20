"""Page tokens: where a list goes on, and of which list, as text that callers hand back without a look into it.

A token is no secret and no right: what it says is checked like any other field.
"""

import base64
import binascii
from collections.abc import Sequence
from typing import TypeAlias

import msgpack

from buffer_service.domain.inspection import Position
from buffer_wire.errors import InvalidField

Shape: TypeAlias = Sequence[int | None]
"""Parts of a position: the least value of an integer, None for a string."""

MAX_CHARS = 1_024
_BOUND = 1 << 53
"""Bound of the integers in a token; the store computes with doubles."""


def to_token(scope: Position, following: Position) -> str:
    """The token of a position in the list that `scope` names with its filters; "" after the last page."""
    if not following:
        return ""
    return base64.urlsafe_b64encode(msgpack.packb((scope, following))).decode()


def position(token: str, scope: Position, shape: Shape) -> Position:
    """The position of a token, () for "". Raises InvalidField for one of another list, or of none."""
    if not token:
        return ()
    found = _unpacked(token) if len(token) <= MAX_CHARS else None
    if isinstance(found, tuple) and len(found) == 2 and found[0] == scope and _has_shape(found[1], shape):
        following: Position = found[1]
        return following
    shown = token if len(token) <= 64 else f"{len(token)} characters"
    raise InvalidField("page_token", shown, "the next_page_token of a request that is the same otherwise")


def _unpacked(token: str) -> object:
    try:
        unpacked: object = msgpack.unpackb(base64.urlsafe_b64decode(token.encode()), use_list=False)
        return unpacked
    except (ValueError, TypeError, binascii.Error, msgpack.UnpackException):
        return None


def _has_shape(parts: object, shape: Shape) -> bool:
    return (
        isinstance(parts, tuple)
        and len(parts) == len(shape)
        and all(
            isinstance(part, str) if least is None else type(part) is int and least <= part < _BOUND
            for part, least in zip(parts, shape, strict=True)
        )
    )
