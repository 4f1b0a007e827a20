"""Keys of payloads: `rb:p:RUN:NONCE:CHECKSUM:SIZE`.

A key names the size of the bytes under it, so that replies can be portioned before they are asked for. It also names a
checksum of header and payload, by which a reader knows that it has what was pushed. A nonce is never used for other
bytes, so a key is never that of two groups.
"""

import re
import secrets
from collections.abc import Sequence

from xxhash import xxh3_64, xxh3_64_intdigest

from buffer_wire.codec import Buffer, MalformedMessage, split_group

NONCE_BYTES = 16
MAX_GROUP_BYTES = (1 << 31) - 1
"""Largest serialized Group: no protobuf can be larger."""
PORTION_BYTES = 4 << 20
"""Largest number of bytes of payloads that are asked for in one command, unless the caller says otherwise."""

_REST = re.compile(r"[0-9a-f]{32}:[0-9a-f]{16}:[1-9][0-9]{0,9}")


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


def payload_key(run_id: str, nonce: bytes, checksum: int, size_bytes: int) -> str:
    """Key of a serialized group of so many bytes. `checksum` is that of the group."""
    return f"rb:p:{run_id}:{nonce.hex()}:{checksum:016x}:{size_bytes}"


def new_nonce() -> bytes:
    """128 random bits."""
    return secrets.token_bytes(NONCE_BYTES)


def size_of(key: str) -> int:
    """Size in bytes of what lies under the key."""
    return int(key.rpartition(":")[2])


def is_key_of(run_id: str, key: str) -> bool:
    """True when the key is that of a payload of the run, of at most MAX_GROUP_BYTES."""
    prefix = key_prefix(run_id)
    return key.startswith(prefix) and bool(_REST.fullmatch(key, len(prefix))) and size_of(key) <= MAX_GROUP_BYTES


def portions(payload_keys: Sequence[str], most_bytes: int = PORTION_BYTES) -> list[Sequence[str]]:
    """The keys split so that each portion's payloads stay below so many bytes (or are one payload)."""
    split: list[Sequence[str]] = []
    first, size = 0, 0
    for index, key in enumerate(payload_keys):
        size += size_of(key)
        if size > most_bytes and index > first:
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
    return key.endswith(f":{group_checksum(header, payload_checksum(payload)):016x}:{len(body)}")
