"""Group messages taken apart and put together without protobuf ever touching a payload.

The wire format is byte for byte that of the .proto files, so that any protobuf client can be at the other end. A group
is kept as its serialized `Group` message from the worker's push to the trainer's pull, and only headers are parsed.
Everything returned is a memoryview into the message that came in.

Unknown fields are skipped. Of a repeated singular field the last one counts, as in protobuf, except that embedded
messages are not merged. Groups, which others parse again, are taken only as what they are to any protobuf.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

from google.protobuf.message import DecodeError, Message

from buffer_wire.revision import Revision
from rollout_buffer.v1 import batches_pb2, common_pb2, groups_pb2

Buffer: TypeAlias = bytes | bytearray | memoryview

M = TypeVar("M", bound=Message)

_VARINT, _I64, _LEN, _I32 = 0, 1, 2, 5


class MalformedMessage(ValueError):
    """The bytes are not a message of the expected type."""


def read_varint(buf: Buffer, at: int) -> tuple[int, int]:
    """The varint at `at` and the position after it. Raises MalformedMessage."""
    result = shift = 0
    try:
        while True:
            byte = buf[at]
            at += 1
            result |= (byte & 0x7F) << shift
            if byte < 0x80:
                return result, at
            shift += 7
            if shift > 63:
                break
    except IndexError:
        pass
    raise MalformedMessage(f"bad varint at byte {at}")


_ONE_BYTE = tuple(bytes([value]) for value in range(0x80))


def varint(value: int) -> bytes:
    """`value` (not negative) as a protobuf varint."""
    if value <= 0x7F:
        return _ONE_BYTE[value]
    out = bytearray()
    while value > 0x7F:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_LENGTH_BYTES = 5
"""Largest number of bytes of a length: newer versions of protobuf refuse a longer one, older ones take it."""


def fields(buf: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Field numbers and values of a message: ints for varints, views for length-delimited; fixed ones are skipped."""
    # Varints of one byte, nearly all, are read in place: the service does this for every group.
    at, end = 0, len(buf)
    while at < end:
        tag, at = buf[at], at + 1
        if tag > 0x7F:
            tag, at = read_varint(buf, at - 1)
        kind = tag & 7
        if kind in (_I64, _I32):
            at += 8 if kind == _I64 else 4
            continue
        if kind not in (_LEN, _VARINT):
            raise MalformedMessage(f"wire type {kind} of field {tag >> 3} is not one of proto3")
        if at >= end:
            raise MalformedMessage("the message is cut off")
        value, at = buf[at], at + 1
        if value > 0x7F:
            begin = at - 1
            value, at = read_varint(buf, begin)
            if kind == _LEN and at - begin > _LENGTH_BYTES:
                raise MalformedMessage(f"the length of field {tag >> 3} takes more than {_LENGTH_BYTES} bytes")
        if kind == _VARINT:
            yield tag >> 3, value
            continue
        stop = at + value
        if stop > end:
            raise MalformedMessage(f"field {tag >> 3} runs {stop - end} bytes past the end of its message")
        yield tag >> 3, buf[at:stop]
        at = stop
    if at > end:
        raise MalformedMessage("the message is cut off")


def _parse(kind: type[M], message: memoryview) -> M:
    """A small embedded message. Raises MalformedMessage."""
    try:
        return kind.FromString(bytes(message))
    except DecodeError as error:
        raise MalformedMessage(str(error)) from error


def _len_field(number: int, size: int) -> bytes:
    return varint(number << 3 | _LEN) + varint(size)


def _int_field(number: int, value: int) -> bytes:
    return varint(number << 3 | _VARINT) + varint(value) if value else b""


def _text_field(number: int, value: str) -> list[Buffer]:
    return [_len_field(number, len(encoded)), encoded] if (encoded := value.encode()) else []


# ── groups ───────────────────────────────────────────────────────────────────

_EMPTY = memoryview(b"")
_HEADER_TAG, _PAYLOAD_TAG = 1 << 3 | _LEN, 2 << 3 | _LEN


_MAX_LENGTH_END = 1 + _LENGTH_BYTES
"""Largest offset at which the first length of a group can end, in bytes."""


def split_group(body: memoryview) -> tuple[memoryview, memoryview]:
    """Header and payload of a serialized Group, which any protobuf can parse. Raises MalformedMessage.

    A header or payload that is there twice is refused: whoever parses the whole would merge them.
    """
    usual = _split_usual(body)
    return usual if usual is not None else _split_unusual(body)[:2]


def split_pushed(body: memoryview) -> tuple[memoryview, memoryview, groups_pb2.StoredPayload | None]:
    """Header and payload of a Group as it is pushed, and what it says in place of a payload; see `split_group`."""
    usual = _split_usual(body)
    return (*usual, None) if usual is not None else _split_unusual(body)


def usual_head(body: memoryview, size_bytes: int) -> tuple[memoryview, int] | None:
    """Header, and start of the payload, of a serialized Group of so many bytes, of which `body` is the beginning.

    None where it is not as it is nearly always written: header, payload, and nothing else. Raises MalformedMessage.
    """
    if len(body) > 2 and body[0] == _HEADER_TAG:
        size, at = read_varint(body, 1)
        stop = at + size
        if at <= _MAX_LENGTH_END and stop < len(body) and body[stop] == _PAYLOAD_TAG:
            size, start = read_varint(body, stop + 1)
            if start + size == size_bytes and start - stop <= _MAX_LENGTH_END:
                return body[at:stop], start
    return None


def payload_offset(first: bytes, size_bytes: int) -> int:
    """Offset of the payload in a serialized Group of so many bytes, which begins with these, at least 6 of them.

    Not checked: that of a group that is not as it is nearly always written may be any, 0 included.
    """
    try:
        header_bytes, at = read_varint(first, 1)
    except MalformedMessage:
        return 0
    # Behind the header and a tag comes the length of what is left behind that length.
    before, length_bytes = at + header_bytes + 1, 1
    while size_bytes - before - length_bytes >> 7 * length_bytes > 0:
        length_bytes += 1
    return before + length_bytes if before + length_bytes <= size_bytes else 0


def _split_usual(body: memoryview) -> tuple[memoryview, memoryview] | None:
    usual = usual_head(body, len(body))
    return (usual[0], body[usual[1] :]) if usual is not None else None


def _split_unusual(body: memoryview) -> tuple[memoryview, memoryview, groups_pb2.StoredPayload | None]:
    # It is kept and handed on as it is: what we skip, others may not.
    group = _parse(groups_pb2.Group, body)
    parts = {1: _EMPTY, 2: _EMPTY}
    for number, value in fields(body):
        if number in parts and isinstance(value, memoryview):
            if parts[number] is not _EMPTY:
                raise MalformedMessage(f"field {number} of the group is there twice")
            parts[number] = value
    return parts[1], parts[2], group.stored if group.HasField("stored") else None


def join_group(header: groups_pb2.GroupHeader | bytes, *payload: Buffer) -> list[Buffer]:
    """The pieces of a serialized Group of a header, serialized or not, and a payload in pieces; nothing is copied."""
    serialized = header if isinstance(header, bytes) else header.SerializeToString()
    return [group_head(serialized, sum(map(len, payload))), *payload]


def group_head(header: Buffer, payload_bytes: int) -> bytes:
    """Bytes before the payload in a Group of a serialized header and so long a payload."""
    return b"".join((_len_field(1, len(header)), header, _len_field(2, payload_bytes)))


def stored_group(header: Buffer, stored: groups_pb2.StoredPayload) -> bytes:
    """A Group, as it is pushed, of a serialized header and a payload that lies in the store."""
    place = stored.SerializeToString()
    return b"".join((_len_field(1, len(header)), header, _len_field(3, len(place)), place))


@dataclass(frozen=True, slots=True)
class PushBundle:
    """A PushGroupsRequest taken apart. `groups` are serialized Group messages, views into the request."""

    run: common_pb2.RunRef
    sequence: int
    groups: list[memoryview]


def split_push(message: Buffer) -> PushBundle:
    """Take a serialized PushGroupsRequest apart. Raises MalformedMessage."""
    run, sequence, groups = common_pb2.RunRef(), 0, []
    for number, value in fields(memoryview(message)):
        if number == 1 and isinstance(value, memoryview):
            run = _parse(common_pb2.RunRef, value)
        elif number == 2 and isinstance(value, int):
            sequence = value
        elif number == 3 and isinstance(value, memoryview):
            groups.append(value)
    return PushBundle(run, sequence, groups)


def split_push_one(message: Buffer) -> PushBundle:
    """Take a serialized PushGroupRequest (one group) apart. Raises MalformedMessage."""
    run, groups = common_pb2.RunRef(), []
    for number, value in fields(memoryview(message)):
        if number == 1 and isinstance(value, memoryview):
            run = _parse(common_pb2.RunRef, value)
        elif number == 2 and isinstance(value, memoryview):
            groups = [value]
    return PushBundle(run, 0, groups)


def join_push(run: common_pb2.RunRef, sequence: int, groups: Iterable[Sequence[Buffer]]) -> bytes:
    """A serialized PushGroupsRequest of groups given as pieces (`join_group`). One copy in all."""
    head = run.SerializeToString()
    parts: list[Buffer] = [_len_field(1, len(head)), head, _int_field(2, sequence)]
    for pieces in groups:
        parts.append(_len_field(3, sum(len(piece) for piece in pieces)))
        parts.extend(pieces)
    return b"".join(parts)


# ── parts of payloads ──


class WrittenPart(NamedTuple):
    """A WritePayloadRequest taken apart; the first of a stream names run and payload."""

    run: common_pb2.RunRef
    payload_key: str
    part: Buffer


def join_written_part(run: common_pb2.RunRef | None, payload_key: str, part: Sequence[Buffer]) -> bytes:
    """A serialized WritePayloadRequest of a part in pieces. One copy in all."""
    head = run.SerializeToString() if run is not None else b""
    named = [_len_field(1, len(head)), head] if head else []
    return b"".join([*named, *_text_field(2, payload_key), _len_field(3, sum(map(len, part))), *part])


def split_written_part(message: Buffer) -> WrittenPart:
    """Take a serialized WritePayloadRequest apart. Raises MalformedMessage."""
    run, payload_key, part = common_pb2.RunRef(), "", _EMPTY
    for number, value in fields(memoryview(message)):
        if number == 1 and isinstance(value, memoryview):
            run = _parse(common_pb2.RunRef, value)
        elif number == 2 and isinstance(value, memoryview):
            payload_key = bytes(value).decode("utf-8", "replace")
        elif number == 3 and isinstance(value, memoryview):
            part = value
    return WrittenPart(run, payload_key, part)


def join_read_part(part: Buffer) -> bytes:
    """A serialized ReadPayloadResponse. One copy in all."""
    return b"".join((_len_field(1, len(part)), part))


def split_read_part(message: Buffer) -> Buffer:
    """The part of a serialized ReadPayloadResponse. Raises MalformedMessage."""
    part = _EMPTY
    for number, value in fields(memoryview(message)):
        if number == 1 and isinstance(value, memoryview):
            part = value
    return part


# ── batches ──────────────────────────────────────────────────────────────────


class Delivered(NamedTuple):
    """A group of a pull stream: `body` is its serialized Group, empty where `payload_key` says where that lies."""

    body: Buffer
    sequence: int
    head_version: int
    tail_version: int
    payload_key: str = ""
    stage: str = ""
    """Stage whose columns these are, of the last group before; empty: it is a group."""
    prior_uses: int = 0
    """Steps that have trained on the group before."""


def join_pull(revision: Revision, groups: Iterable[Delivered]) -> bytes:
    """A serialized PullBatchResponse of groups. One copy in all."""
    parts: list[Buffer] = [_int_field(1, revision)]
    for group in groups:
        tail = _int_field(2, group.sequence) + _int_field(3, group.head_version) + _int_field(4, group.tail_version)
        where = _text_field(5, group.payload_key) or [_len_field(1, len(group.body)), group.body]
        if group.stage:
            where += _text_field(6, group.stage)
        if group.prior_uses:
            tail += _int_field(7, group.prior_uses)
        parts += [_len_field(3, sum(map(len, where)) + len(tail)), *where, tail]
    return b"".join(parts + _text_field(4, revision.proof))


def split_pull(message: Buffer) -> tuple[Revision, batches_pb2.BatchInfo | None, list[Delivered]]:
    """Revision, batch facts (first message only) and groups of a PullBatchResponse. Raises MalformedMessage."""
    revision, proof, batch, groups = 0, "", None, []
    for number, value in fields(memoryview(message)):
        if number == 1 and isinstance(value, int):
            revision = value
        elif number == 2 and isinstance(value, memoryview):
            batch = _parse(batches_pb2.BatchInfo, value)
        elif number == 3 and isinstance(value, memoryview):
            groups.append(_split_delivered(value))
        elif number == 4 and isinstance(value, memoryview):
            proof = bytes(value).decode("utf-8", "replace")
    return Revision(revision, proof), batch, groups


def _split_delivered(message: memoryview) -> Delivered:
    body, payload_key, stage, sequence, head_version, tail_version = _EMPTY, "", "", 0, 0, 0
    prior_uses = 0
    for number, value in fields(message):
        if isinstance(value, int):
            if number == 2:
                sequence = value
            elif number == 3:
                head_version = value
            elif number == 4:
                tail_version = value
            elif number == 7:
                prior_uses = value
        elif number == 1:
            body = value
        elif number == 5:
            payload_key = bytes(value).decode("utf-8", "replace")
        elif number == 6:
            stage = bytes(value).decode("utf-8", "replace")
    return Delivered(body, sequence, head_version, tail_version, payload_key, stage, prior_uses)
