"""Pieces of a file that is being fetched: which bytes have come, which are under way, and the checksum of the front.

Invariant: the checksum covers the bytes from the first to the first that is missing. What comes in order is hashed as
it comes; what comes ahead of it is read back from the file.
"""

import asyncio
import hashlib
import os
from collections import Counter

PIECE_BYTES = 1 << 20
_READ_BYTES = 1 << 20


class Pieces:
    """Pieces of a file of `size` bytes."""

    def __init__(self, size: int) -> None:
        self.size = size
        count = max(1, -(-size // PIECE_BYTES))
        self._filled = [0] * count
        self._taken = [False] * count
        self._wanted: Counter[int] = Counter()
        self._sha256 = hashlib.sha256()
        self._hashed = 0
        self._first = 0
        """All pieces below this one are complete."""
        self._grown = asyncio.Event()
        self.received = 0
        """Bytes that have come, wherever they belong."""
        self.beginning = 0
        """Number of times that all was fetched anew: bytes read before are none of this file's any more."""

    @property
    def complete(self) -> bool:
        """True when no byte is missing."""
        return self.received == self.size

    @property
    def sha256(self) -> bytes:
        """Checksum of the front of the file; of all of it when it is complete."""
        return self._sha256.digest()

    def take(self) -> int | None:
        """The next piece to fetch, which is nobody else's until it is put back; None when there is none."""
        while self._first < len(self._filled) and not self.missing(self._first):
            self._first += 1
        piece: int
        for piece in (*self._wanted, *range(self._first, len(self._filled))):
            if piece < len(self._filled) and not self._taken[piece] and self.missing(piece):
                self._taken[piece] = True
                return piece
        return None

    def take_next(self, piece: int) -> bool:
        """Take the piece after this one too, if it is free and nothing of it has come."""
        after = piece + 1
        free = after < len(self._filled) and not self._taken[after] and not self._filled[after]
        if free:
            self._taken[after] = True
        return free

    def put_back(self, piece: int) -> None:
        """Leave a piece, complete or not, to whoever takes it next."""
        self._taken[piece] = False

    def span(self, piece: int) -> tuple[int, int]:
        """Bytes [start, stop) of a piece that have not come."""
        return piece * PIECE_BYTES + self._filled[piece], min((piece + 1) * PIECE_BYTES, self.size)

    def missing(self, piece: int) -> int:
        """Number of bytes of a piece that have not come."""
        start, stop = self.span(piece)
        return stop - start

    def add(self, descriptor: int, piece: int, chunk: bytes) -> None:
        """Write what comes next of a piece. Blocking; one call at a time."""
        start, _ = self.span(piece)
        at = start
        view = memoryview(chunk)
        while view:
            written = os.pwrite(descriptor, view, at)
            at, view = at + written, view[written:]
        if start == self._hashed:
            self._sha256.update(chunk)
            self._hashed += len(chunk)
        self._filled[piece] += len(chunk)
        self.received += len(chunk)
        while ahead := min(self.ready(self._hashed), _READ_BYTES):
            behind = os.pread(descriptor, ahead, self._hashed)
            self._sha256.update(behind)
            self._hashed += len(behind)

    def ready(self, start: int) -> int:
        """Number of bytes that have come from `start` on without a gap."""
        piece, at = start // PIECE_BYTES, start
        while piece < len(self._filled):
            end = piece * PIECE_BYTES + self._filled[piece]
            if end <= at:
                break
            at, piece = end, piece + 1
            if end % PIECE_BYTES:
                break
        return at - start

    def grew(self) -> None:
        """Wake those who wait for bytes."""
        self._grown.set()
        self._grown = asyncio.Event()

    async def until(self, start: int) -> int:
        """Wait for the byte at `start`, whose piece comes first meanwhile; returns how many are ready from there."""
        piece = start // PIECE_BYTES
        self._wanted[piece] += 1
        try:
            while not (ready := self.ready(start)):
                await self._grown.wait()
        finally:
            self._wanted[piece] -= 1
            if not self._wanted[piece]:
                del self._wanted[piece]
        return ready

    def start_over(self) -> None:
        """Forget what has come."""
        self.beginning += 1
        self._first = 0
        self._filled = [0] * len(self._filled)
        self._sha256, self._hashed, self.received = hashlib.sha256(), 0, 0
