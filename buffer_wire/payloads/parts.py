"""Payloads cut into their parts as they are written, and checked part by part as they are read."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from xxhash import xxh3_64

from buffer_wire.codec import Buffer, MalformedMessage, group_head, usual_head
from buffer_wire.payloads.keys import (
    Part,
    group_checksum,
    names,
    new_nonce,
    part_count,
    part_keys,
    payload_checksum,
    payload_key,
    size_of,
)
from rollout_buffer.v1 import groups_pb2


@dataclass(frozen=True, slots=True)
class NewPayload:
    """A serialized group under a new key, which its pusher writes."""

    key: str
    pieces: Sequence[Buffer]
    """The group, in flat pieces."""
    stored: groups_pb2.StoredPayload
    """Fields by which the push names it."""

    @classmethod
    def of(cls, run_id: str, header: bytes, payload: Sequence[Buffer], *, in_parts: bool) -> Self:
        """Draw a key for a serialized header and a payload in flat pieces; `in_parts`: the service knows parts."""
        payload_bytes = sum(map(len, payload))
        head = group_head(header, payload_bytes)
        size = len(head) + payload_bytes
        parts = part_count(size) if in_parts else 0
        stored = groups_pb2.StoredPayload(nonce=new_nonce(), checksum=payload_checksum(*payload), parts=parts)
        key = payload_key(run_id, stored.nonce, group_checksum(header, stored.checksum), size, parts)
        return cls(key, (head, *payload), stored)

    def cut(self) -> Iterator[tuple[Part, tuple[Buffer, ...]]]:
        """The parts, each with its bytes."""
        return cut(self.key, self.pieces)


def cut(key: str, pieces: Iterable[Buffer]) -> Iterator[tuple[Part, tuple[Buffer, ...]]]:
    """The parts of the payload of a key, each with its bytes, of a serialized group in flat pieces: nothing is copied.

    The pieces have as many bytes as the key says.
    """
    keys = part_keys(key)
    if len(keys) == 1:
        yield keys[0], tuple(pieces)
        return
    coming = iter(pieces)
    rest = memoryview(b"")
    for part in keys:
        taken: list[Buffer] = []
        missing = part.size
        while missing:
            rest = rest or memoryview(next(coming))
            taken.append(rest[:missing])
            rest = rest[len(taken[-1]) :]
            missing -= len(taken[-1])
        yield part, tuple(taken)


class PartsCheck:
    """Check of a payload against its key, of which one part after the other is seen: it need not be in memory."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._header: bytes | None = None
        self._payload = xxh3_64()
        self._seen_bytes = 0

    @property
    def is_good(self) -> bool:
        """True once what was seen is the group that the key names, header first."""
        if self._header is None:
            return False
        return names(self._key, group_checksum(self._header, self._payload.intdigest()), self._seen_bytes)

    def see(self, part: Buffer) -> None:
        """Take the next part into account."""
        view = memoryview(part)
        if not self._seen_bytes:
            with contextlib.suppress(MalformedMessage):
                if head := usual_head(view, size_of(self._key)):
                    self._header = bytes(head[0])
                    self._payload.update(view[head[1] :])
        else:
            self._payload.update(view)
        self._seen_bytes += len(view)
