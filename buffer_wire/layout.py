"""The payload of a group: columns of samples laid end to end, read and written without a copy of large arrays.

Each column of the header occupies `rows * item_size` bytes, starting at the next multiple of 8 from the payload's
start, little-endian and C-contiguous. Rows are those of sample 0, then sample 1, and so on. The layout follows from
the header alone, so the service can check a payload's length without reading it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from sys import byteorder
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from buffer_wire.limits import ALIGNMENT, aligned
from buffer_wire.resp.encoding import JOIN_BYTES
from rollout_buffer.v1 import groups_pb2 as pb

Buffer: TypeAlias = bytes | bytearray | memoryview
Array: TypeAlias = npt.NDArray[np.generic]
Rows: TypeAlias = Array | Sequence[Array]
"""Rows of a column: an array of shape [rows, *item_shape], or several that are laid end to end."""

_PADDING = [bytes(count) for count in range(ALIGNMENT)]
_LITTLE_ENDIAN = "<|=" if byteorder == "little" else "<|"

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

_ITEM_BYTES: Mapping[int, int] = {wire: dtype.itemsize for wire, dtype in NUMPY_DTYPES.items()}

REQUIRED_COLUMNS: Sequence[tuple[str, int]] = (
    (TOKEN_IDS, pb.D_TYPE_INT32),
    (LOGPROBS, pb.D_TYPE_FLOAT32),
    (LOSS_MASK, pb.D_TYPE_UINT8),
)
"""Name and dtype of the first three columns of every group, all per token and scalar."""


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """A column as its header entry describes it, taken apart once."""

    name: str
    dtype: np.dtype[np.generic]
    axis: int
    item_shape: tuple[int, ...]
    row_bytes: int
    """Bytes of one row: items times item size."""
    ragged_rows: tuple[int, ...]
    """Rows of each sample, for AXIS_RAGGED."""

    def rows(self, tokens: int, samples: int) -> int:
        """Rows of the column in a group of this many tokens and samples."""
        if self.axis == pb.AXIS_TOKEN:
            return tokens
        return samples if self.axis == pb.AXIS_SAMPLE else sum(self.ragged_rows)


@lru_cache(maxsize=1024)
def column_spec(serialized: bytes) -> ColumnSpec:
    """The column of a serialized header entry; the groups of a run repeat the same few.

    Raises KeyError for a dtype that does not exist.
    """
    column = pb.Column.FromString(serialized)
    dtype = NUMPY_DTYPES[column.dtype]
    shape = tuple(column.item_shape)
    return ColumnSpec(column.name, dtype, column.axis, shape, prod(shape) * dtype.itemsize, tuple(column.rows))


def column_specs(header: pb.GroupHeader) -> list[ColumnSpec]:
    """The columns of a header, in order. Raises KeyError for a dtype that does not exist."""
    return [column_spec(column.SerializeToString()) for column in header.columns]


def column_rows(header: pb.GroupHeader, column: pb.Column) -> list[int]:
    """Rows of the column for each sample."""
    if column.axis == pb.AXIS_TOKEN:
        return [sample.tokens for sample in header.samples]
    if column.axis == pb.AXIS_SAMPLE:
        return [1] * len(header.samples)
    return list(column.rows)


def extent(specs: Sequence[ColumnSpec], tokens: int, samples: int) -> int:
    """Length in bytes of the payload of such a group."""
    offset = 0
    for spec in specs:
        offset = aligned(offset) + spec.rows(tokens, samples) * spec.row_bytes
    return offset


def payload_bytes(header: pb.GroupHeader) -> int:
    """Length in bytes of the payload that the header describes."""
    tokens = sum(sample.tokens for sample in header.samples)
    return extent(column_specs(header), tokens, len(header.samples))


def write_payload(columns: Sequence[Rows]) -> bytes:
    """The payload of columns, in the header's order, in one piece."""
    return b"".join(payload_pieces(columns))


def payload_pieces(columns: Sequence[Rows]) -> list[Buffer]:
    """The payload of columns, in the header's order, as pieces of bytes; large arrays are not copied.

    Arrays of up to JOIN_BYTES are joined with their neighbours: to hash and send one by itself costs more than its
    copy. Those that are not contiguous, or not little-endian, are copied one by one.
    """
    pieces: list[Buffer] = []
    small: list[Any] = []  # arrays and bytes: numpy's type does not say that it is a buffer
    offset = 0
    for column in columns:
        if padding := -offset % ALIGNMENT:
            small.append(_PADDING[padding])
            offset += padding
        for rows in (column,) if isinstance(column, np.ndarray) else column:
            array = rows
            if array.dtype.byteorder not in _LITTLE_ENDIAN or not array.flags.c_contiguous:
                array = np.ascontiguousarray(rows, dtype=rows.dtype.newbyteorder("<"))
            size = array.nbytes
            offset += size
            if size <= JOIN_BYTES:
                small.append(array)
                continue
            if small:
                pieces.append(b"".join(small))
                small = []
            pieces.append(array.data.cast("B"))
    if small:
        pieces.append(b"".join(small))
    return pieces


def read_payload(header: pb.GroupHeader, payload: Buffer) -> dict[str, Array]:
    """Read-only views of the payload's columns by name, each of shape [rows, *item_shape]; nothing is copied.

    Raises ValueError when the payload's length is not what the header says.
    """
    tokens, samples = sum([sample.tokens for sample in header.samples]), len(header.samples)
    read: dict[str, Array] = {}
    stop = 0
    for spec in column_specs(header):
        rows = spec.rows(tokens, samples)
        start = aligned(stop)
        stop = start + rows * spec.row_bytes
        if stop == start:
            read[spec.name] = np.empty((rows, *spec.item_shape), spec.dtype)
            continue
        flat = np.frombuffer(payload, spec.dtype, (stop - start) // spec.dtype.itemsize, start)
        read[spec.name] = flat.reshape(rows, *spec.item_shape) if spec.item_shape else flat
    if stop != len(payload):
        raise ValueError(f"the header describes {stop} bytes, and the payload's buffer has {len(payload)}")
    return read


def column_of(name: str, array: Array, axis: int, rows: Sequence[int] = ()) -> pb.Column:
    """The header entry for an array of shape [rows, *item_shape]. Raises KeyError for a dtype that does not travel."""
    dtype = _WIRE_DTYPES[array.dtype.newbyteorder("<")]
    return pb.Column(name=name, dtype=dtype, axis=axis, item_shape=array.shape[1:], rows=rows)  # type: ignore[arg-type]
