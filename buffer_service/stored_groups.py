"""Groups as they lie in the store, of which as little is read as is asked for."""

from dataclasses import dataclass
from struct import iter_unpack

from google.protobuf.message import DecodeError

from buffer_service import commands
from buffer_service.domain.inspection import TaskFacts
from buffer_service.domain.ports import RunStore
from buffer_wire.codec import Buffer, MalformedMessage, read_varint, split_group
from buffer_wire.errors import InvalidField, UnknownGroup, UnknownTask
from buffer_wire.limits import MAX_HEADER_BYTES, TASK_ID, aligned
from buffer_wire.payloads.keys import is_of, size_of
from rollout_buffer.v1 import groups_pb2

_FIRST_BYTES = 64 << 10
_TAGS_BYTES = 12
"""Largest size in bytes of the payload's tag and length."""
_HEADER_TAG, _PAYLOAD_TAG = 1 << 3 | 2, 2 << 3 | 2


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group's header, and where its payload is: from a byte of its body on, or, of an unusual body, here."""

    key: str
    header: groups_pb2.GroupHeader
    payload_at: int
    payload: memoryview | None = None

    async def token_ids(self, store: RunStore, sample: int, first: int, count: int) -> list[int]:
        """Up to `count` token ids of a sample from its token `first` on. Raises InvalidField (tokens_of_sample)."""
        begin, length = self._tokens(sample, first, count)
        raw = await self._read(store, 4 * begin, 4 * length)
        return [number for (number,) in iter_unpack("<i", raw[: len(raw) // 4 * 4])]

    async def loss_mask(self, store: RunStore, sample: int, first: int, count: int) -> bytes:
        """Loss mask of these tokens, a byte each. Raises InvalidField (tokens_of_sample)."""
        begin, length = self._tokens(sample, first, count)
        # Behind the token ids and the logprobs, of 4 bytes a token each.
        column = 4 * sum(one.tokens for one in self.header.samples)
        return await self._read(store, aligned(aligned(column) + column) + begin, length)

    def _tokens(self, sample: int, first: int, count: int) -> tuple[int, int]:
        """The first of these tokens among those of all samples, and how many there are."""
        samples = self.header.samples
        if sample >= len(samples):
            raise InvalidField("tokens_of_sample", sample, f"below {len(samples)}, the samples of the group")
        begin = sum(one.tokens for one in samples[:sample]) + first
        return begin, max(0, min(count, samples[sample].tokens - first))

    async def _read(self, store: RunStore, begin: int, size: int) -> bytes:
        """Bytes of the payload."""
        if not size:
            return b""
        if self.payload is not None:
            return bytes(self.payload[begin : begin + size])
        return await store.read_payload(self.key, self.payload_at + begin, size)


def undamaged(key: str, body: Buffer | None) -> Buffer | None:
    """The body; None where there is none, or another than the key says: a client may have written anything."""
    return body if body is not None and is_of(key, body) else None


async def read_group(store: RunStore, key: str) -> StoredGroup | None:
    """The header of a stored group; None when its body is gone, or is no group."""
    body = await store.read_payload(key, 0, _FIRST_BYTES)
    if not body:
        return None
    try:
        return await _read_usual(store, key, body) or await _read_whole(store, key)
    except (MalformedMessage, DecodeError):
        return None


async def _read_usual(store: RunStore, key: str, body: bytes) -> StoredGroup | None:
    """A body as it is nearly always written: header, payload, and nothing else. None for another."""
    if body[0] != _HEADER_TAG:
        return None
    size, at = read_varint(body, 1)
    stop = at + min(size, MAX_HEADER_BYTES)
    if stop + _TAGS_BYTES > len(body):
        body += await store.read_payload(key, len(body), stop + _TAGS_BYTES - len(body))
    if stop >= len(body) or body[stop] != _PAYLOAD_TAG:
        return None
    _, payload_at = read_varint(body, stop + 1)
    return StoredGroup(key, groups_pb2.GroupHeader.FromString(body[at:stop]), payload_at)


async def _read_whole(store: RunStore, key: str) -> StoredGroup | None:
    body = await store.read_payload(key, 0, size_of(key))
    if not body:
        # Deleted since its beginning was read.
        return None
    head, payload = split_group(memoryview(body))
    return StoredGroup(key, groups_pb2.GroupHeader.FromString(bytes(head)), 0, payload)


async def find_group(store: RunStore, run_id: str, group_id: str) -> tuple[int, int, TaskFacts, StoredGroup]:
    """Revision, time, task and header of an accepted group that is stored. Raises InvalidField, UnknownGroup."""
    task_id, _, incarnation = group_id.partition("/")
    if not TASK_ID.fullmatch(task_id) or not (incarnation.isascii() and incarnation.isdecimal()):
        raise InvalidField("group_id", group_id[:200], "task_id/incarnation")
    try:
        revision, now_ms, task = await store.call(commands.task(run_id, task_id))
    except UnknownTask:
        raise UnknownGroup(run_id, group_id) from None
    accepted = task.accepted_attempt >= 0 and task.incarnation == int(incarnation[:15])
    group = await read_group(store, task.body_key) if accepted else None
    if group is None:
        raise UnknownGroup(run_id, group_id)
    return revision, now_ms, task, group
