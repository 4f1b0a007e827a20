"""Patches of weight files: blocks that lie about their length, lists beyond their block, streams that blow up.

An input is a list of blocks, written so that damage reaches what lies under the compression: a byte of flags, two bytes
of length, and the body. Flags: the two low bits are the kind, 4: the body is compressed, 8: the block says another
length than it has, 16: zeros are put in the body's place, 64 KiB for each of its bytes.
"""

import io
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from buffer_wire.weights import patch
from buffer_wire.weights.patch import MAGIC, PatchInvalid, apply_patch, write_patch

SMALL, LIES, BOMB, PACKED = 256, 8, 16, 4
BLOCKS = 5
MOST_GIVEN = 64
"""Most blocks of an input."""
_PLACE = Path(tempfile.mkdtemp(prefix="fuzz-patches-"))
_BASE = np.random.default_rng(0).integers(0, 256, SMALL * BLOCKS - 1, dtype=np.uint8).tobytes()
patch.BLOCK_BYTES = SMALL


def _seed(changed: slice) -> bytes:
    """The blocks of a patch that changes some of the bytes."""
    words = bytearray(_BASE)
    words[changed] = bytes(len(words[changed]))
    old, new, made = (_PLACE / name for name in ("old", "new", "made"))
    old.write_bytes(_BASE)
    new.write_bytes(words)
    made.unlink(missing_ok=True)
    assert write_patch(old, new, made, max_bytes=1 << 20)
    stream = io.BytesIO(made.read_bytes()[16:])
    blocks = b""
    while head := stream.read(5):
        body = zlib.decompress(packed) if (packed := stream.read(int.from_bytes(head[1:], "little"))) else b""
        blocks += bytes([head[0] | (PACKED if packed else 0)]) + len(body).to_bytes(2, "little") + body
    return blocks


SEEDS = (_seed(slice(0, 0)), _seed(slice(3, 5)), _seed(slice(0, None, 40)), _seed(slice(0, None)))


def one(data: bytes) -> None:
    """A patch is refused, or gives a file of the base's length, in blocks of no more than a block's."""
    (_PLACE / "base").write_bytes(_BASE)
    whole = MAGIC + len(_BASE).to_bytes(8, "little") + b"".join(_blocks(data))
    sizes: list[int] = []
    refusal = None
    with (_PLACE / "base").open("rb") as base:
        try:
            apply_patch(base, io.BytesIO(whole), lambda block: sizes.append(len(block)))
        except PatchInvalid as error:
            refusal = str(error)
    assert refusal is None or refusal, "no reason"
    assert (refusal is None) <= (sum(sizes) == len(_BASE)), "another length"
    assert max(sizes, default=0) <= SMALL


def _blocks(data: bytes) -> Iterator[bytes]:
    at = 0
    for _ in range(MOST_GIVEN):
        if at >= len(data):
            return
        flags, length = data[at], int.from_bytes(data[at + 1 : at + 3], "little")
        body = data[at + 3 : at + 3 + length]
        at += 3 + length
        if flags & BOMB:
            body = bytes(min(len(body), 16) << 16)
        if flags & PACKED:
            body = zlib.compress(body, 1)
        said = len(body) ^ (length << 8 if flags & LIES else 0)
        yield bytes([flags & 3]) + (said & 0xFFFFFFFF).to_bytes(4, "little") + body
