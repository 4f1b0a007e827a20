"""Columns that the user's functions give: checked by name when they are given, and laid into groups.

A reward or rollout function returns a number, or a mapping: `reward`, and further values by the names of their columns.

    return {"reward": 1.0, "format": 0.5, "teacher_logprobs": array, "boxes": ragged(boxes), "scores": per_sample(row)}

Numbers are float32 for the sample. Arrays have a row for each token of the response, or of prompt and response; they
keep their dtype, and lists of numbers are float32. Invariant: all samples of a group have the same columns, of one
dtype, axis and item shape; of a ragged column a sample may have no rows.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, TypeAlias

import numpy as np

from buffer_wire import engine_columns, layout, limits
from buffer_wire.errors import InvalidField
from rollout_buffer.v1 import groups_pb2 as pb
from rollout_workers.errors import PolicyError

REWARD_COLUMN = "given_reward"
"""Column of partial rollouts: the reward that a rollout function gave, NaN where it gave none."""
FINISH_COLUMN = "turn_finish"
"""Column of partial rollouts: the end of each turn, as an index of group_messages._TURN_FINISHES."""

REWARD = "reward"
"""Key of the reward in a mapping."""

RESERVED = engine_columns.ALL | {
    REWARD,
    layout.TOKEN_IDS,
    layout.LOGPROBS,
    layout.LOSS_MASK,
    REWARD_COLUMN,
    FINISH_COLUMN,
}
"""Names of columns that are not for the user's functions."""

_DTYPES = sorted({dtype.name for dtype in layout.NUMPY_DTYPES.values()})
_AXES: Mapping[int, str] = {pb.AXIS_TOKEN: "per token", pb.AXIS_SAMPLE: "per sample", pb.AXIS_RAGGED: "ragged"}


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Rows of one sample, any number of them: [rows, …]."""

    rows: Any


@dataclass(frozen=True, slots=True, eq=False)
class PerSample:
    """Array that belongs to the sample as a whole, of the same shape for each."""

    values: Any


def ragged(rows: Any) -> Ragged:  # noqa: ANN401 - whatever numpy makes an array of
    """Mark an array [rows, …] as a ragged column: each sample may have another number of rows."""
    return Ragged(rows)


def per_sample(values: Any) -> PerSample:  # noqa: ANN401
    """Mark an array as one value of the sample, in place of a row for each token."""
    return PerSample(values)


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """Column of one sample."""

    axis: int
    values: layout.Array
    """Values: [T, …] per token of prompt and response, […] per sample, [rows, …] ragged."""

    @property
    def rows(self) -> layout.Array:
        """Rows of the column, [rows, …]."""
        return self.values[np.newaxis] if self.axis == pb.AXIS_SAMPLE else self.values

    @property
    def kind(self) -> str:
        """Dtype, item shape and axis, on which all samples have to agree."""
        return f"{self.values.dtype.name} {list(self.rows.shape[1:])} {_AXES[self.axis]}"


Columns: TypeAlias = Mapping[str, Given]


@dataclass(frozen=True, slots=True, eq=False)
class Returned:
    """Result of a function: a reward, not checked yet, and checked columns."""

    reward: object
    columns: Columns = field(default_factory=dict)
    failure: str = ""
    """Name of what is wrong with the answer; empty: nothing is."""


def returned(value: object, *, prompt: int, response: int) -> Returned:
    """Take apart what a function returned, or the PolicyError that it raised, for a sample with so many tokens. Raises
    InvalidField for a column.
    """
    if isinstance(value, Returned):
        return value
    if isinstance(value, PolicyError):
        return replace(returned(value.result, prompt=prompt, response=response), failure=value.name)
    if not isinstance(value, Mapping):
        return Returned(value)
    columns = {
        name: column(name, each, prompt=prompt, response=response) for name, each in value.items() if name != REWARD
    }
    # An empty list tells no dtype and no shape: the sample has no rows, whatever they are elsewhere.
    known = {
        name: given for name, given in columns.items() if given.axis != pb.AXIS_RAGGED or given.values.shape != (0,)
    }
    return Returned(value.get(REWARD), known)


def is_finite(reward: object) -> bool:
    """True for what is a finite number, or becomes one."""
    try:
        return isfinite(float(reward))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False


def check_name(name: object) -> None:
    """Raise InvalidField for what cannot be the name of a column."""
    if not isinstance(name, str) or not limits.COLUMN_NAME.fullmatch(name):
        raise InvalidField("column", name, "a name of 1 to 64 characters of [a-z0-9_]")
    if name in RESERVED:
        raise InvalidField("column", name, f"a name of your own: {', '.join(sorted(RESERVED))} are taken")


def column(name: object, value: object, *, prompt: int, response: int) -> Given:
    """The column of a sample with so many tokens. Raises InvalidField."""
    check_name(name)
    at = f"column {name}"
    if isinstance(value, PerSample):
        return _checked(at, pb.AXIS_SAMPLE, _array(at, value.values))
    if isinstance(value, Ragged):
        array = _array(at, value.rows)
        if not array.ndim:
            raise InvalidField(at, "a number", "rows, in ragged([rows, …])")
        return _checked(at, pb.AXIS_RAGGED, array)
    array = _array(at, value)
    if not array.ndim:
        return Given(pb.AXIS_SAMPLE, array.astype(np.float32))
    if len(array) == response:
        array = np.concatenate([np.zeros((prompt, *array.shape[1:]), array.dtype), array])
    elif len(array) != prompt + response:
        limit = (
            f"{response} rows, one for each token of the response, or {prompt + response} with the prompt's; "
            "ragged() and per_sample() mark other arrays"
        )
        raise InvalidField(at, f"shape {list(array.shape)}", limit)
    return _checked(at, pb.AXIS_TOKEN, array)


def _array(at: str, value: object) -> layout.Array:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidField(at, type(value).__name__, f"a number or an array ({error})") from error
    if array.dtype == np.bool_:
        array = array.astype(np.uint8)
    if isinstance(value, Sequence) and array.dtype.kind in "iuf":
        array = array.astype(np.float32)
    if array.dtype.name not in _DTYPES:
        what = array.dtype.name if array.dtype.kind != "O" else f"objects of {type(value).__name__}"
        raise InvalidField(at, what, f"numbers of {', '.join(_DTYPES)}")
    return array


def _checked(at: str, axis: int, array: layout.Array) -> Given:
    given = Given(axis, np.ascontiguousarray(array) if array.ndim else array)
    if given.rows.ndim - 1 > limits.MAX_ITEM_DIMENSIONS:
        most = limits.MAX_ITEM_DIMENSIONS
        raise InvalidField(at, f"shape {list(array.shape)}", f"at most {most} dimensions beside the rows")
    return given


def both(first: Columns, second: Columns) -> Columns:
    """Columns that came in two ways. Raises InvalidField for a name that came in both."""
    if twice := sorted(first.keys() & second.keys()):
        raise InvalidField(f"column {twice[0]}", "given twice for a sample", "given once")
    return {**first, **second}


def of_trajectory(columns: Columns) -> Columns:
    """Those of a sample's columns that further rows of it have, too: what belongs to the sample as a whole."""
    return {name: given for name, given in columns.items() if given.axis == pb.AXIS_SAMPLE}


def check_alike(samples: Mapping[int, Columns]) -> None:
    """Raise InvalidField unless these samples, by index, have the same columns of the same kinds; a sample without a
    ragged one has no rows of it.
    """
    for name in sorted({name for columns in samples.values() for name in columns}):
        first, kind = next((i, columns[name]) for i, columns in samples.items() if name in columns)
        for index, columns in samples.items():
            given = columns.get(name)
            if given is None and kind.axis == pb.AXIS_RAGGED:
                continue
            if given is None or given.kind != kind.kind:
                what = "absent" if given is None else given.kind
                raise InvalidField(f"column {name}", f"{what} in sample {index}", f"{kind.kind}, as in sample {first}")


def given_to_wire(samples: Sequence[Columns], tokens: Sequence[int]) -> list[tuple[pb.Column, layout.Rows]]:
    """Header entries and rows of the columns, of samples with so many tokens.

    A sample without them is not finished: it has zeros, and of ragged columns no rows.
    """
    kinds = {name: given for columns in samples for name, given in columns.items()}
    made: list[tuple[pb.Column, layout.Rows]] = []
    for name, kind in kinds.items():
        empty = {pb.AXIS_TOKEN: None, pb.AXIS_SAMPLE: 1, pb.AXIS_RAGGED: 0}[kind.axis]  # type: ignore[index]
        parts = [
            columns[name].rows
            if name in columns
            else np.zeros((total if empty is None else empty, *kind.rows.shape[1:]), kind.values.dtype)
            for columns, total in zip(samples, tokens, strict=True)
        ]
        rows = [len(part) for part in parts] if kind.axis == pb.AXIS_RAGGED else ()
        made.append((layout.column_of(name, kind.rows, kind.axis, rows), parts))
    return made


def given_of_wire(
    header: pb.GroupHeader, columns: Mapping[str, layout.Array], *, finished: Sequence[bool]
) -> list[Columns]:
    """Each finished sample's columns in a partial rollout; {} for the others."""
    samples: list[dict[str, Given]] = [{} for _ in header.samples]
    for entry in header.columns:
        if entry.name in RESERVED:
            continue
        at = 0
        for sample, rows, whole in zip(samples, layout.column_rows(header, entry), finished, strict=True):
            part = columns[entry.name][at : at + rows]
            at += rows
            if whole:
                sample[entry.name] = Given(entry.axis, part[0] if entry.axis == pb.AXIS_SAMPLE else part)
    return list(samples)


# ── between processes ────────────────────────────────────────────────────────


def to_message(given: Returned) -> tuple[dict[str, Any], bytes]:
    """An object for JSON, and the columns' bytes behind each other. Raises TypeError for a reward that is no JSON."""
    head = {
        "reward": given.reward,
        "failure": given.failure,
        "columns": [[name, c.axis, c.values.dtype.str, list(c.values.shape)] for name, c in given.columns.items()],
    }
    json.dumps(head)
    return head, b"".join(c.values.tobytes() for c in given.columns.values())


def from_message(head: Mapping[str, Any], data: bytes) -> Returned:
    """The inverse of `to_message`."""
    columns, at = {}, 0
    for name, axis, code, shape in head["columns"]:
        dtype = np.dtype(code)
        count = int(np.prod(shape, dtype=np.int64))
        columns[name] = Given(axis, np.frombuffer(data, dtype, count, at).reshape(shape))
        at += count * dtype.itemsize
    return Returned(head["reward"], columns, head["failure"])
