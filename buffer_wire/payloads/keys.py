"""Keys of payloads: `rb:p:RUN:NONCE:CHECKSUM:SIZE`, or `…:SIZE:PARTS`, whose part i lies under that and `.i`.

A key names the size of the bytes under it, so that replies can be portioned before they are asked for. It also names a
checksum of header and payload, by which a reader knows that it has what was pushed. A nonce is never used for other
bytes, so a key is never that of two groups. Only this module says which keys the store has of a payload, and how
long each is; its twin for scripts is store/lua/lib/groups/parts.lua.
"""

import os
import re
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from xxhash import xxh3_64, xxh3_64_intdigest

from buffer_wire.codec import Buffer, MalformedMessage, split_group

NONCE_BYTES = 16
MAX_GROUP_BYTES = (1 << 31) - 1
"""Largest serialized Group: no protobuf can be larger."""
WHOLE_BYTES = 8 << 20
"""Largest payload that lies under its key alone."""
PART_BYTES = 2 << 20
"""Size of a part. With an append-only file a write holds the store up for 25 ms at 8 MiB, 11 at 4 and 2 at 2."""
PORTION_BYTES = 4 << 20
"""Largest number of bytes of payloads that are asked for in one command, unless the caller says otherwise."""

_REST = re.compile(r"[0-9a-f]{32}:[0-9a-f]{16}:[1-9][0-9]{0,9}(:[1-9][0-9]{0,3})?")


_NONCE, _CHECKSUM, _SIZE, _PARTS = 3, 4, 5, 6
"""Places of a key's fields."""
_TIME_BYTES = 6
_LONGEST_MS = 365 * 86_400_000
"""Age of a payload, in milliseconds, beyond which its nonce is taken for random bytes."""
_CLOCKS_APART_MS = 60_000
"""Difference of two machines' clocks beyond which it is."""


class Part(NamedTuple):
    """A part of a payload, or all of it: its key in the store, and its size in bytes."""

    key: str
    size: int


def key_prefix(run_id: str) -> str:
    """Beginning of the keys of all payloads of a run, and of no other run."""
    return f"rb:p:{run_id}:"


def payload_checksum(*pieces: Buffer) -> int:
    """XXH3-64 of a payload, whole or in pieces: the checksum that a push names."""
    if len(pieces) == 1:
        return xxh3_64_intdigest(pieces[0])
    digest = xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()


def group_checksum(header: Buffer, payload_sum: int) -> int:
    """Checksum of a group: XXH3-64 of its serialized header, seeded with the checksum of its payload."""
    return xxh3_64_intdigest(header, payload_sum)


def payload_key(run_id: str, nonce: bytes, checksum: int, size_bytes: int, parts: int = 0) -> str:
    """Key of a serialized group of so many bytes, in so many parts. `checksum` is that of the group."""
    in_parts = f":{parts}" if parts else ""
    return f"rb:p:{run_id}:{nonce.hex()}:{checksum:016x}:{size_bytes}{in_parts}"


def part_count(size_bytes: int) -> int:
    """Number of parts of a payload of this size: 0 where it lies under its key alone."""
    return -(-size_bytes // PART_BYTES) if size_bytes > WHOLE_BYTES else 0


def new_nonce() -> bytes:
    """Nonce that begins with the time in milliseconds, 48 bits; 80 random bits follow."""
    return (time.time_ns() // 1_000_000).to_bytes(_TIME_BYTES) + os.urandom(NONCE_BYTES - _TIME_BYTES)


def made_ms(key: str) -> int | None:
    """Time at which the payload of a key was first handed over, in milliseconds since 1970.

    None where its nonce tells none: a client's own may be random. One of 10,000 such is taken for a time.
    """
    told, now = int(key.split(":")[_NONCE][: 2 * _TIME_BYTES], 16), time.time_ns() // 1_000_000
    return told if now - _LONGEST_MS <= told <= now + _CLOCKS_APART_MS else None


def with_new_nonce(key: str) -> str:
    """Another key for the same bytes."""
    fields = key.split(":")
    fields[_NONCE] = new_nonce().hex()
    return ":".join(fields)


@lru_cache(maxsize=4096)
def size_of(key: str) -> int:
    """Size in bytes of the payload of a key."""
    return int(key.split(":")[_SIZE])


@lru_cache(maxsize=4096)
def parts_of(key: str) -> int:
    """Number of parts of the payload of a key; 0: it lies under the key itself."""
    return int("".join(key.split(":")[_PARTS:]) or 0)


def part_keys(key: str) -> list[Part]:
    """All that the store has of the payload of a key, in order."""
    size, count = size_of(key), parts_of(key)
    if not count:
        return [Part(key, size)]
    return [Part(f"{key}.{index}", min(PART_BYTES, size - index * PART_BYTES)) for index in range(count)]


def within(key: str, first: int, size: int) -> list[tuple[Part, int, int]]:
    """Parts that have the bytes [first, first + size) of a payload, each with the ends of these within itself."""
    found, at, stop = [], 0, first + size
    for part in part_keys(key):
        start, end = max(first - at, 0), min(stop - at, part.size)
        if start < end:
            found.append((part, start, end))
        at += part.size
    return found


def all_part_keys(payload_keys: Iterable[str]) -> list[str]:
    """Keys of the store under which these payloads lie."""
    return [part.key for key in payload_keys for part in part_keys(key)]


def is_key_of(run_id: str, key: str) -> bool:
    """True when the key is that of a payload of the run, of at most MAX_GROUP_BYTES, whose size has so many parts."""
    prefix = key_prefix(run_id)
    if not key.startswith(prefix) or not _REST.fullmatch(key, len(prefix)) or size_of(key) > MAX_GROUP_BYTES:
        return False
    return parts_of(key) in (0, part_count(size_of(key)))


def portions(payload_keys: Sequence[str], most_bytes: int = PORTION_BYTES) -> list[Sequence[str]]:
    """The keys split so that each portion's payloads stay below so many bytes, or are one. One in parts is alone."""
    split: list[Sequence[str]] = []
    first, size = 0, 0
    for index, key in enumerate(payload_keys):
        size += size_of(key)
        if index > first and (size > most_bytes or parts_of(key) or parts_of(payload_keys[first])):
            split.append(payload_keys[first:index])
            first, size = index, size_of(key)
    if first < len(payload_keys):
        split.append(payload_keys[first:])
    return split


def is_of(key: str, body: Buffer) -> bool:
    """True when the bytes are the group that the key names: they have its size and its checksum."""
    try:
        header, payload = split_group(memoryview(body))
    except MalformedMessage:
        return False
    return names(key, group_checksum(header, payload_checksum(payload)), len(body))


def names(key: str, checksum: int, size_bytes: int) -> bool:
    """True when the key is that of a group of this checksum and size."""
    return key.split(":")[_CHECKSUM:_PARTS] == [f"{checksum:016x}", str(size_bytes)]
