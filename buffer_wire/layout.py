"""The payload of a group: columns of samples laid end to end, read and written without a copy per array.

Each column of the header occupies `rows * item_size` bytes, starting at the next multiple of 8 from the payload's
start, little-endian and C-contiguous. Rows are those of sample 0, then sample 1, and so on. The layout follows from
the header alone, so the service can check a payload's length without reading it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rollout_buffer.v1 import groups_pb2 as pb

Buffer: TypeAlias = bytes | bytearray | memoryview
Array: TypeAlias = npt.NDArray[np.generic]

ALIGNMENT = 8

TOKEN_IDS = "token_ids"  # noqa: S105 - a column name, not a password
LOGPROBS = "logprobs"
LOSS_MASK = "loss_mask"

NUMPY_DTYPES: Mapping[int, np.dtype[np.generic]] = {
    pb.D_TYPE_UINT8: np.dtype("<u1"),
    pb.D_TYPE_INT8: np.dtype("<i1"),
    pb.D_TYPE_UINT16: np.dtype("<u2"),
    pb.D_TYPE_INT16: np.dtype("<i2"),
    pb.D_TYPE_INT32: np.dtype("<i4"),
    pb.D_TYPE_INT64: np.dtype("<i8"),
    pb.D_TYPE_FLOAT16: np.dtype("<f2"),
    # numpy has no bfloat16: its bits travel and arrive as uint16.
    pb.D_TYPE_BFLOAT16: np.dtype("<u2"),
    pb.D_TYPE_FLOAT32: np.dtype("<f4"),
    pb.D_TYPE_FLOAT64: np.dtype("<f8"),
}
"""numpy dtype of each wire dtype."""

_WIRE_DTYPES: Mapping[np.dtype[np.generic], int] = {
    dtype: wire for wire, dtype in NUMPY_DTYPES.items() if wire != pb.D_TYPE_BFLOAT16
}

REQUIRED_COLUMNS: Sequence[tuple[str, int]] = (
    (TOKEN_IDS, pb.D_TYPE_INT32),
    (LOGPROBS, pb.D_TYPE_FLOAT32),
    (LOSS_MASK, pb.D_TYPE_UINT8),
)
"""Name and dtype of the first three columns of every group, all per token and scalar."""


@dataclass(frozen=True, slots=True)
class ColumnPlace:
    """Where a column lies in the payload: bytes [start, stop), `shape` = (rows, *item_shape)."""

    column: pb.Column
    start: int
    stop: int
    shape: tuple[int, ...]


def aligned(offset: int) -> int:
    """The next multiple of 8."""
    return (offset + ALIGNMENT - 1) & -ALIGNMENT


def column_rows(header: pb.GroupHeader, column: pb.Column) -> list[int]:
    """Rows of the column for each sample."""
    if column.axis == pb.AXIS_TOKEN:
        return [sample.tokens for sample in header.samples]
    if column.axis == pb.AXIS_SAMPLE:
        return [1] * len(header.samples)
    return list(column.rows)


def places(header: pb.GroupHeader) -> Iterator[ColumnPlace]:
    """Where each column of the header lies, in order."""
    tokens = sum(sample.tokens for sample in header.samples)
    offset = 0
    for column in header.columns:
        if column.axis == pb.AXIS_TOKEN:
            rows = tokens
        elif column.axis == pb.AXIS_SAMPLE:
            rows = len(header.samples)
        else:
            rows = sum(column.rows)
        start = aligned(offset)
        offset = start + rows * prod(column.item_shape) * NUMPY_DTYPES[column.dtype].itemsize
        yield ColumnPlace(column, start, offset, (rows, *column.item_shape))


def payload_bytes(header: pb.GroupHeader) -> int:
    """Length in bytes of the payload that the header describes."""
    stop = 0
    for place in places(header):
        stop = place.stop
    return stop


def write_payload(columns: Sequence[Array]) -> bytes:
    """Lay arrays of shape [rows, *item_shape] end to end, in the header's order. One copy in all."""
    parts: list[Buffer] = []
    offset = 0
    for array in columns:
        start = aligned(offset)
        if start != offset:
            parts.append(bytes(start - offset))
        little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        parts.append(little.data.cast("B") if little.size else b"")
        offset = start + little.nbytes
    return b"".join(parts)


def read_payload(header: pb.GroupHeader, payload: Buffer) -> dict[str, Array]:
    """Read-only views of the payload's columns by name, each of shape [rows, *item_shape]; nothing is copied.

    Raises ValueError when the payload is shorter than the header says.
    """
    return {
        place.column.name: np.frombuffer(
            payload,
            dtype=NUMPY_DTYPES[place.column.dtype],
            count=prod(place.shape),
            offset=place.start,
        ).reshape(place.shape)
        if place.stop > place.start
        else np.empty(place.shape, NUMPY_DTYPES[place.column.dtype])
        for place in places(header)
    }


def column_of(name: str, array: Array, axis: int, rows: Sequence[int] = ()) -> pb.Column:
    """The header entry for an array of shape [rows, *item_shape]. Raises KeyError for a dtype that does not travel."""
    dtype = _WIRE_DTYPES[array.dtype.newbyteorder("<")]
    return pb.Column(name=name, dtype=dtype, axis=axis, item_shape=array.shape[1:], rows=rows)  # type: ignore[arg-type]
