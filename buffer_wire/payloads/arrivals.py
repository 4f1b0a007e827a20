"""Payloads on their way into memory: put where their columns are aligned, and hashed while they are in the cache.

Invariant: nothing is copied, except the first few bytes of each.
"""

from collections.abc import Sequence

import numpy as np

from buffer_wire.codec import payload_offset
from buffer_wire.payloads.asks import checked_body
from buffer_wire.payloads.keys import is_of, size_of
from buffer_wire.payloads.parts import PartsCheck
from buffer_wire.resp.blocking import memory_of

ALIGNMENT = 64
"""Every payload starts at a multiple of it, in bytes: a line of the cache, and the widest vector."""
HASHED_BYTES = 1 << 18
"""Bytes that are hashed at once, while they are in the cache. Smaller payloads are hashed when they are whole."""


class Arrival:
    """A payload that is received, whole or part by part (`buffer_wire.resp.blocking.Body`)."""

    __slots__ = ("_check", "_is_good", "_key", "_payload_at", "_room", "_seen", "_size", "_start", "_stop", "_whole")

    def __init__(self, key: str, room: "_Room") -> None:
        self._key = key
        self._size = size_of(key)
        self._room = room
        self._check: PartsCheck | None = None
        self._is_good = False
        self._whole = memoryview(b"")
        self._start = 0
        """Offset of what is being received."""
        self._stop = self._size
        self._payload_at = 0
        self._seen = 0
        """Bytes that the check has seen."""

    @property
    def size(self) -> int:
        """Bytes of what is being received."""
        return self._stop - self._start

    def part(self, size: int) -> "Arrival":
        """Go on with the next part, of so many bytes."""
        self._start = self._stop if len(self._whole) else 0
        self._stop = self._start + size
        return self

    def begin(self, first: bytes) -> memoryview:
        """Memory for what is being received, which begins with these bytes."""
        if not len(self._whole):
            self._payload_at = payload_offset(first, self._size)
            self._whole = self._room.place(self._size, self._payload_at)
        return self._whole[self._start : self._stop]

    def came(self, filled: int) -> None:
        """Hash what has come, once the header is there."""
        stop = self._start + filled
        is_whole = stop == len(self._whole)
        if self._check is None:
            if is_whole:
                self._is_good = is_of(self._key, self._whole)
            if is_whole or stop < HASHED_BYTES or not 0 < self._payload_at <= stop:
                return
            self._check = PartsCheck(self._key)
        if is_whole or stop - self._seen >= HASHED_BYTES:
            self._check.see(self._whole[self._seen : stop])
            self._seen = stop
            self._is_good = is_whole and self._check.is_good

    def checked(self) -> memoryview:
        """The group, once all of it is there. Raises Unreadable."""
        return self._whole.toreadonly() if self._is_good else checked_body(self._key, self._whole)


def arrivals_of(keys: Sequence[str]) -> list[Arrival]:
    """Arrivals of payloads that are received one after the other, into one piece of memory."""
    room = _Room(sum(map(size_of, keys)) + len(keys) * ALIGNMENT)
    return [Arrival(key, room) for key in keys]


class _Room:
    def __init__(self, size: int) -> None:
        self._memory = memory_of(size)
        self._address = np.frombuffer(self._memory, np.uint8).ctypes.data
        self._end = 0

    def place(self, size: int, aligned_at: int) -> memoryview:
        """The next so many bytes whose byte `aligned_at` is aligned."""
        start = self._end + -(self._address + self._end + aligned_at) % ALIGNMENT
        self._end = start + size
        return self._memory[start : self._end]
