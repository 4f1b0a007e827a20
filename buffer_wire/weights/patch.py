"""Patch of a weights file: the words that differ from an older file of the same length, compressed.

Between two steps of reinforcement learning most bfloat16 weights keep their value, so a patch is small. Format,
little-endian: `MAGIC`; u64 length of either file; then for each BLOCK_BYTES of it (the last may be shorter) a u8 kind
and a u32 length of what follows, which is zlib's:

- SAME: nothing follows, nothing differs.
- SPARSE: u32 count; then count u16 gaps (words that do not differ before each that does), count u16 values.
- DENSE: a u16 for every word.

A value is the exclusive or of the two files' words of 16 bits; a file of odd length has a zero byte more. Of gaps and
values the low bytes come first, then the high ones. Whether a patch fits is not in it: the checksum of the result says.
"""

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

MAGIC = b"RBPATCH1"
BLOCK_BYTES = 4 << 20
SAME, SPARSE, DENSE = range(3)

_HEAD = struct.Struct("<8sQ")
_BLOCK = struct.Struct("<BI")
_COUNT = struct.Struct("<I")
_WORD = 2
_SPARSE_BELOW = 0.25
"""Share of words that differ below which only they are listed: a gap is as long as a value."""
_FARTHEST = (1 << 16) - 1
_LEVEL = 1
"""Level of zlib: the higher ones take several times as long for a few per cent."""

Words = npt.NDArray[np.uint16]


class PatchInvalid(ValueError):
    """A patch is no patch, or is made for a file of another length."""


def write_patch(base: Path, target: Path, patch: Path, *, max_bytes: int) -> bool:
    """Write to `patch` what makes `target` of `base`. Blocking; compresses on all cores.

    False, without a file, if the two differ in length or the patch would have more than `max_bytes`. Raises OSError.
    """
    with base.open("rb") as old, target.open("rb") as new, ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        size = os.fstat(new.fileno()).st_size
        if os.fstat(old.fileno()).st_size != size:
            return False
        with patch.open("xb") as out:
            out.write(_HEAD.pack(MAGIC, size))
            pairs = _pairs(old, new)
            while some := list(islice(pairs, os.cpu_count() or 1)):
                for kind, body in pool.map(_encoded, some):
                    out.write(_BLOCK.pack(kind, len(body)) + body)
                if out.tell() > max_bytes:
                    break
            else:
                return True
    patch.unlink()
    return False


def apply_patch(base: BinaryIO, patch: BinaryIO, take: Callable[[bytes], object]) -> None:
    """Give `take` the patched file, block by block. Blocking. Raises PatchInvalid, OSError."""
    size = os.fstat(base.fileno()).st_size
    if patch.read(_HEAD.size) != _HEAD.pack(MAGIC, size):
        raise PatchInvalid(f"it is no patch of a file of {size} bytes")
    while old := base.read(BLOCK_BYTES):
        head = patch.read(_BLOCK.size)
        if len(head) != _BLOCK.size:
            raise PatchInvalid("it ends early")
        kind, length = _BLOCK.unpack(head)
        # A block of a file at most, and what zlib may add to it.
        if length > 2 * BLOCK_BYTES:
            raise PatchInvalid(f"a block of {length} bytes")
        take(_patched(old, kind, patch.read(length)))
    if patch.read(1):
        raise PatchInvalid("it goes on after its last block")


def _pairs(old: BinaryIO, new: BinaryIO) -> Iterator[tuple[bytes, bytes]]:
    while block := new.read(BLOCK_BYTES):
        yield old.read(BLOCK_BYTES), block


def _encoded(pair: tuple[bytes, bytes]) -> tuple[int, bytes]:
    old, new = pair
    if old == new:
        return SAME, b""
    differing = _words(old) ^ _words(new)
    at = np.flatnonzero(differing)
    gaps = np.diff(at, prepend=-1) - 1
    if len(at) < _SPARSE_BELOW * len(differing) and gaps.max() <= _FARTHEST:
        body = _COUNT.pack(len(at)) + _planes(gaps.astype("<u2")) + _planes(differing[at])
        return SPARSE, zlib.compress(body, _LEVEL)
    return DENSE, zlib.compress(_planes(differing), _LEVEL)


def _patched(old: bytes, kind: int, body: bytes) -> bytes:
    if kind == SAME and not body:
        return old
    words = _words(old).copy()
    if kind == DENSE:
        planes = _inflated(body, len(words) * _WORD)
        if len(planes) != len(words) * _WORD:
            raise PatchInvalid("a block of another length")
        words ^= _unplaned(planes)
    elif kind == SPARSE:
        listed = _inflated(body, _COUNT.size + 2 * _WORD * len(words))
        if len(listed) < _COUNT.size or len(listed) != _COUNT.size + 2 * _WORD * _COUNT.unpack_from(listed)[0]:
            raise PatchInvalid("a list of another length than it says")
        gaps, values = np.split(_unplaned(listed[_COUNT.size :], parts=2), 2)
        at = np.cumsum(gaps.astype(np.int64) + 1) - 1
        if len(at) and at[-1] >= len(words):
            raise PatchInvalid("a word beyond its block")
        words[at] ^= values
    else:
        raise PatchInvalid(f"a block of kind {kind}")
    return words.tobytes()[: len(old)]


def _inflated(body: bytes, most: int) -> bytes:
    """Decompress at most `most` bytes. Raises PatchInvalid where there are more, or where it is not zlib's."""
    inflating = zlib.decompressobj()
    try:
        found = inflating.decompress(body, most + 1)
    except zlib.error as error:
        raise PatchInvalid(str(error)) from None
    if len(found) > most or not inflating.eof:
        raise PatchInvalid(f"a block that does not end within {most} bytes")
    return found


def _words(block: bytes) -> Words:
    return np.frombuffer(block + bytes(len(block) % _WORD), "<u2")


def _planes(words: npt.NDArray[np.uint16]) -> bytes:
    return np.ascontiguousarray(words).view(np.uint8).reshape(-1, _WORD).T.tobytes()


def _unplaned(planes: bytes, *, parts: int = 1) -> Words:
    """The words of `parts` arrays of equal length, one behind the other."""
    if len(planes) % (_WORD * parts):
        raise PatchInvalid("half a word")
    arrays = np.frombuffer(planes, np.uint8).reshape(parts, _WORD, -1)
    return np.ascontiguousarray(arrays.transpose(0, 2, 1)).view("<u2").reshape(-1)
