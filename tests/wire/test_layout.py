"""The payload layout: columns end to end, aligned, described by the header alone."""

import numpy as np
import pytest

from buffer_wire import layout
from buffer_wire.validate import check_group
from rollout_buffer.v1 import groups_pb2 as pb
from tests.wire.groups import make_header

pytestmark = pytest.mark.matrix


def test_columns_come_back_as_they_were_laid_down() -> None:
    extra = np.arange(24, dtype=np.float16).reshape(12, 2)
    header, columns = make_header([5, 7], extra={"experts": extra})
    payload = layout.write_payload(columns)
    read = layout.read_payload(header, payload)
    assert list(read) == ["token_ids", "logprobs", "loss_mask", "experts"]
    for expected, array in zip(columns, read.values(), strict=True):
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)


def test_the_headers_length_is_the_payloads_length() -> None:
    for lengths in ([1], [3, 4], [5, 7, 11], [8]):
        header, columns = make_header(lengths)
        assert layout.payload_bytes(header) == len(layout.write_payload(columns))


def test_reading_copies_nothing_and_the_views_are_read_only() -> None:
    header, columns = make_header([5, 7])
    payload = layout.write_payload(columns)
    raw = np.frombuffer(payload, np.uint8)
    for array in layout.read_payload(header, payload).values():
        assert np.shares_memory(array, raw)
        assert not array.flags.writeable


def test_every_column_starts_at_a_multiple_of_eight() -> None:
    header, columns = make_header([5, 7, 1], extra={"a": np.zeros((13, 3), np.int8)})
    payload = layout.write_payload(columns)
    first = np.frombuffer(payload, np.uint8).ctypes.data
    assert all((array.ctypes.data - first) % 8 == 0 for array in layout.read_payload(header, payload).values())


@pytest.mark.parametrize("tokens", [1, 7, 300, 5_000, 40_000])
def test_a_payload_of_samples_in_pieces_is_that_of_their_columns(tokens: int) -> None:
    """Whatever of it is joined, and however the samples' arrays lie."""
    header, columns = make_header([tokens, 1, tokens + 3], extra={"pair": np.ones((2 * tokens + 4, 2), np.int16)})
    cuts = [tokens, tokens + 1]
    pieces = layout.payload_pieces([np.split(column, cuts) for column in columns])
    assert b"".join(pieces) == layout.write_payload(columns)
    assert sum(map(len, pieces)) == layout.payload_bytes(header)
    strided = [np.split(np.repeat(column, 2, axis=0)[::2], cuts) for column in columns]
    assert b"".join(layout.payload_pieces(strided)) == b"".join(pieces)
    empty = [[column[:0], column, column[:0]] for column in columns]
    assert b"".join(layout.payload_pieces(empty)) == b"".join(pieces)


def test_large_arrays_of_a_payload_are_not_copied() -> None:
    _, columns = make_header([20_000, 20_000])
    pieces = [np.frombuffer(piece, np.uint8) for piece in layout.payload_pieces([np.split(c, 2) for c in columns])]
    for half in np.split(columns[0], 2) + np.split(columns[1], 2):
        assert any(np.shares_memory(half, piece) for piece in pieces)


def test_ragged_and_per_sample_columns_have_their_own_rows() -> None:
    header, columns = make_header([5, 7])
    pixels = np.arange(15, dtype=np.uint8).reshape(5, 3)
    score = np.array([0.5, 1.5])
    header.columns.append(layout.column_of("pixels", pixels, pb.AXIS_RAGGED, rows=[2, 3]))
    header.columns.append(layout.column_of("score", score, pb.AXIS_SAMPLE))
    payload = layout.write_payload([*columns, pixels, score])
    check_group(header, len(payload))
    read = layout.read_payload(header, payload)
    np.testing.assert_array_equal(read["pixels"], pixels)
    np.testing.assert_array_equal(read["score"], score)
    assert layout.column_rows(header, header.columns[3]) == [2, 3]
    assert layout.column_rows(header, header.columns[4]) == [1, 1]


def test_big_endian_arrays_travel_as_little_endian() -> None:
    header, columns = make_header([2, 2])
    big = [columns[0].astype(">i4"), *columns[1:]]
    np.testing.assert_array_equal(layout.read_payload(header, layout.write_payload(big))["token_ids"], columns[0])


def test_a_payload_of_another_length_is_an_error_not_garbage() -> None:
    header, columns = make_header([5, 7])
    payload = layout.write_payload(columns)
    for wrong in (payload[:-1], payload + b"x"):
        with pytest.raises(ValueError, match="buffer"):
            layout.read_payload(header, wrong)
