"""Keys of payloads: `rb:p:RUN:NONCE:CHECKSUM:SIZE`.

A key names the bytes under it: their size, so that replies can be portioned before they are asked for, and a checksum
of header and payload, by which a reader knows that it has what was pushed. A nonce is never used for other bytes, so a
key is never that of two groups.
"""

import secrets

from xxhash import xxh3_64_intdigest

from buffer_wire.codec import Buffer, MalformedMessage, split_group

NONCE_BYTES = 16


def key_prefix(run_id: str) -> str:
    """What the keys of all payloads of a run begin with, and of no other run."""
    return f"rb:p:{run_id}:"


def payload_checksum(payload: Buffer) -> int:
    """XXH3-64 of a payload, the checksum that a push names."""
    return xxh3_64_intdigest(payload)


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


def checksum_of(key: str) -> int:
    """Checksum of the group that lies under the key."""
    return int(key.rsplit(":", 2)[1], 16)


def is_of(key: str, body: Buffer) -> bool:
    """True when the bytes are the group that the key names: they have its size and its checksum."""
    if len(body) != size_of(key):
        return False
    try:
        header, payload = split_group(memoryview(body))
    except MalformedMessage:
        return False
    return group_checksum(header, payload_checksum(payload)) == checksum_of(key)
