"""Payloads as the blocking reader receives them: however the reply is cut, each is checked, and its columns are
aligned.
"""

import socket
import time
from typing import Any

import numpy as np
import pytest

from buffer_wire.codec import group_head
from buffer_wire.layout import payload_pieces, read_payload
from buffer_wire.payloads.arrivals import ALIGNMENT, HASHED_BYTES, arrivals_of
from buffer_wire.payloads.asks import Unreadable
from buffer_wire.payloads.keys import group_checksum, payload_checksum, payload_key
from buffer_wire.resp.blocking import FIRST_BYTES, BlockingConnection
from buffer_wire.resp.errors import ConnectionLost, OtherReply
from rollout_buffer.v1 import groups_pb2
from tests.wire.groups import make_header

CUTS = [1, FIRST_BYTES, 1_000, HASHED_BYTES + 1, 1 << 22]


class Cut:
    """A socket that gives the bytes of a reply, so many at a time."""

    def __init__(self, reply: bytes, at_once: int) -> None:
        self.left = memoryview(reply)
        self._at_once = at_once

    def settimeout(self, _seconds: float | None) -> None:
        pass

    def setsockopt(self, *_option: object) -> None:
        pass

    def recv_into(self, memory: memoryview, _size: int = 0, _flags: int = 0) -> int:
        return self._give(memory, self._at_once)

    def _give(self, memory: memoryview, most: int) -> int:
        count = min(len(memory), most, len(self.left))
        memory[:count] = self.left[:count]
        self.left = self.left[count:]
        return count


def group_of(tokens: int, task: str) -> tuple[str, bytes, groups_pb2.GroupHeader]:
    """A key, the group under it, and its header."""
    header, columns = make_header([tokens, 3])
    header.task_id = task
    payload = b"".join(payload_pieces(columns))
    serialized = header.SerializeToString()
    body = group_head(serialized, len(payload)) + payload
    checksum = group_checksum(serialized, payload_checksum(payload))
    return payload_key("r", bytes(16), checksum, len(body)), body, header


def reply_to(bodies: list[bytes], *, in_array: bool = True) -> bytes:
    head = b"*%d\r\n" % len(bodies) if in_array else b""
    return head + b"".join(b"$%d\r\n%b\r\n" % (len(body), body) for body in bodies)


def received(keys: list[str], reply: bytes, at_once: int, *, tls: bool) -> list[memoryview]:
    connection = BlockingConnection(Cut(reply, at_once))  # type: ignore[arg-type]
    vars(connection)["_is_tls"] = tls
    arrivals = arrivals_of(keys)
    connection.expect_bodies(arrivals, 5.0, in_array=True)
    assert not len(vars(connection)["_socket"].left)
    return [arrival.checked() for arrival in arrivals]


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("at_once", CUTS)
def test_groups_come_whole_and_their_columns_aligned_however_the_reply_is_cut(at_once: int, tls: bool) -> None:
    lengths = [1, 5, 50, 777] if at_once == 1 else [1, 300, 777, 40_000, 100_001]
    made = [group_of(tokens, "t" * (1 + index)) for index, tokens in enumerate(lengths)]
    came = received([key for key, _, _ in made], reply_to([body for _, body, _ in made]), at_once, tls=tls)
    assert came == [body for _, body, _ in made]
    for group, (_, body, header) in zip(came, made, strict=True):
        assert group.readonly
        payload = groups_pb2.Group.FromString(body).payload
        for array in read_payload(header, group[len(body) - len(payload) :]).values():
            assert array.flags.aligned
        assert np.frombuffer(group[len(body) - len(payload) :], np.uint8).ctypes.data % ALIGNMENT == 0


@pytest.mark.parametrize("at_once", CUTS[1:])
@pytest.mark.parametrize("damaged", [3, 30, 200, 300_000, -1])
def test_a_damaged_byte_is_found_wherever_it_is(at_once: int, damaged: int) -> None:
    key, body, _ = group_of(100_000, "t")
    harmed = bytearray(body)
    harmed[damaged] ^= 1
    with pytest.raises(Unreadable, match="checksum"):
        received([key], reply_to([bytes(harmed)]), at_once, tls=False)


def test_a_group_that_is_written_in_an_unusual_way_is_checked_whole() -> None:
    """A header whose length is no shortest varint is the same to any protobuf, and has the same checksum."""
    key, body, header = group_of(100_000, "t")
    size = header.ByteSize()
    assert body[1:3] == bytes([size & 0x7F | 0x80, size >> 7]) or size < 0x80
    longer = bytes([body[0], size & 0x7F | 0x80, size >> 7 | 0x80, 0]) + body[2 if size < 0x80 else 3 :]
    renamed = key.rpartition(":")[0] + f":{len(longer)}"
    assert received([renamed], reply_to([longer]), 10_000, tls=False) == [longer]


@pytest.mark.parametrize("at_once", CUTS)
def test_a_body_of_another_size_is_told_with_its_place(at_once: int) -> None:
    key, body, _ = group_of(50, "t")
    other, longer, _ = group_of(51, "t")
    del other
    with pytest.raises(OtherReply) as raised:
        received([key, key], reply_to([body, longer]), at_once, tls=False)
    assert (raised.value.index, raised.value.line) == (1, f"${len(longer)}")


def test_bodies_shorter_than_what_comes_first_are_told_by_their_checksum() -> None:
    keys = [payload_key("r", bytes(16), 1, size) for size in (1, 5, 6, 7)]
    bodies: Any = [b"\n" * size for size in (1, 5, 6, 7)]
    with pytest.raises(Unreadable, match="checksum"):
        received(keys, reply_to(bodies), 3, tls=False)


@pytest.mark.parametrize("sent", [b"", b"*1\r\n$100", b"*1\r\n$100\r\n12345678"])
def test_a_reply_that_stops_is_waited_for_until_the_deadline(sent: bytes) -> None:
    ours, its = socket.socketpair()
    with ours, its:
        its.send(sent)
        began = time.monotonic()
        with pytest.raises(ConnectionLost, match="no answer in time"):
            BlockingConnection(ours).expect_bodies(
                arrivals_of([payload_key("r", bytes(16), 1, 100)]), 0.2, in_array=True
            )
        assert 0.15 < time.monotonic() - began < 5
