"""Checks that many requests share. Each raises InvalidField naming the field, its value and the limit."""

import re
from collections.abc import Callable, Iterable, Sized
from typing import Any, TypeVar

from buffer_service.domain.ops import WeightVersion
from buffer_wire import limits
from buffer_wire.errors import InvalidField
from buffer_wire.messages import MessageT, message_of
from buffer_wire.revision import Revision
from rollout_buffer.v1 import common_pb2

T = TypeVar("T")
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def run_id(value: str, field: str = "run.run_id") -> str:
    """A run's id."""
    if not limits.RUN_ID.fullmatch(value):
        raise InvalidField(field, value, "1 to 64 characters of [A-Za-z0-9._-], beginning with a letter or digit")
    return value


def run_ref(run: common_pb2.RunRef) -> tuple[str, Revision]:
    """Id and seen revision of a reference to a run."""
    seen = number(run.seen_revision, "run.seen_revision", 0, limits.MAX_INTEGER)
    return run_id(run.run_id), Revision(seen, text(run.seen_proof, "run.seen_proof", 0, 64))


def name(value: str, field: str) -> str:
    """A worker's or an engine's name."""
    if not _NAME.fullmatch(value):
        raise InvalidField(field, value, "1 to 128 characters of [A-Za-z0-9._:-]")
    return value


def text(value: str, field: str, low: int, high: int) -> str:
    """Text of `low` to `high` characters."""
    if not low <= len(value) <= high:
        shown = value if len(value) <= 64 else f"{len(value)} characters"
        raise InvalidField(field, shown, f"{low} to {high} characters" if low else f"at most {high} characters")
    return value


def line(value: str, field: str, low: int, high: int) -> str:
    """Text of `low` to `high` characters that is a name, an address or the like: without control characters."""
    if limits.CONTROL.search(value):
        raise InvalidField(field, value, "without control characters")
    return text(value, field, low, high)


def lease_id(value: str, field: str = "lease_id", low: int = 1) -> str:
    """A lease's id as a worker says it."""
    return line(value, field, low, 160)


def number(value: int, field: str, low: int, high: int) -> int:
    """An integer of `low` to `high`."""
    if not low <= value <= high:
        raise InvalidField(field, value, f"{low} to {high}")
    return value


def count(values: Sized, field: str, low: int, high: int) -> None:
    """Check that there are `low` to `high` entries. Raises InvalidField."""
    if not low <= len(values) <= high:
        raise InvalidField(field, f"{len(values)} entries", f"{low} to {high} entries")


def size(value: bytes, field: str, high: int) -> bytes:
    """Check that the value has at most `high` bytes. Raises InvalidField."""
    if len(value) > high:
        raise InvalidField(field, f"{len(value)} bytes", f"at most {high} bytes")
    return value


def term(value: int, field: str = "term") -> int:
    """A trainer's term."""
    if value < 1:
        raise InvalidField(field, value, "at least 1")
    return value


def version(value: common_pb2.WeightVersion, field: str) -> WeightVersion:
    """A weight version that is set."""
    return WeightVersion(
        term(value.term, f"{field}.term"), number(value.version, f"{field}.version", 0, limits.MAX_VERSION)
    )


def reply(kind: type[MessageT], result: Any, **given: Any) -> MessageT:  # noqa: ANN401 - of any field's type
    """The reply of an operation: its result's fields, the proof of its revision, and `given` fields."""
    return message_of(kind, result, revision_proof=result.revision.proof, **given)


def within(place: str, convert: Callable[[Any], T], message: Any) -> T:  # noqa: ANN401 - of any message
    """A converted part of a request. Raises InvalidField, whose field is named from `place` on."""
    try:
        return convert(message)
    except InvalidField as error:
        told = error.attributes
        raise InvalidField.from_wire(
            f"{place}.{error.message}", {**told, "field": f"{place}.{told['field']}"}
        ) from None


def unique(values: Iterable[T], field: str, part: str = "") -> None:
    """Check that no value is given twice; `part` is the field of the entries that holds it. Raises InvalidField."""
    seen: set[T] = set()
    for i, value in enumerate(values):
        if value in seen:
            raise InvalidField(f"{field}[{i}]{part}", str(value), "given once in the request")
        seen.add(value)
