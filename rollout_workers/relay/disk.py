"""Files of a relay on disk, by the SHA-256 of their content, within a bound.

Layout: root/files/DIGEST is complete, root/partial/DIGEST is under way. Invariants: a file gets its name only after its
checksum; one that an earlier process left is checked before its first use; what goes is what was asked for least
recently, so the newest versions stay. A file that is removed is served to its end by those who have it open.
"""

import asyncio
import hashlib
import math
import os
import re
import shutil
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import structlog

from rollout_workers.weights.files import hash_into

_DIGEST = re.compile(r"[0-9a-f]{64}")
_CHECK_S = 60.0
"""Shortest time between two checks of a file that somebody doubts."""

_log = structlog.get_logger()


@dataclass(slots=True)
class Stored:
    """File that is complete."""

    size: int
    checked_at: float
    """Moment at which its content was compared with its name, on the monotonic clock; -inf: not by this process."""


class Disk:
    """Disk space of a relay: at most `max_bytes` in files that are complete or under way. One process a directory."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        self._files, self._partial = root / "files", root / "partial"
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        """Complete files, that asked for least recently first."""
        self._reserved: dict[str, int] = {}
        """Bytes of files that are under way."""
        self._checks: dict[str, asyncio.Task[bool]] = {}
        self.evictions = 0

    def open(self) -> None:
        """Make the directories, drop what was under way, and list what is complete. Raises OSError."""
        shutil.rmtree(self._partial, ignore_errors=True)
        for directory in (self._files, self._partial):
            directory.mkdir(parents=True, exist_ok=True)
        found = [(path.stat(), path.name) for path in self._files.iterdir() if _DIGEST.fullmatch(path.name)]
        for state, name in sorted(found, key=lambda one: one[0].st_mtime_ns):
            self._stored[name] = Stored(state.st_size, -math.inf)
        self._make_room(0)

    @property
    def used_bytes(self) -> int:
        """Bytes of all files, those under way as if they were complete."""
        return sum(one.size for one in self._stored.values()) + sum(self._reserved.values())

    @property
    def count(self) -> int:
        """Number of complete files."""
        return len(self._stored)

    async def find(self, digest: str, *, doubted: bool = False) -> Path | None:
        """The complete file, from now on that asked for last; None when there is none, or it is not what its name says.

        `doubted`: compare it with its name anew, at most once a minute.
        """
        stored, path = self._stored.get(digest), self._files / digest
        if stored is None:
            return None
        self._stored.move_to_end(digest)
        if math.isinf(stored.checked_at) or (doubted and time.monotonic() - stored.checked_at > _CHECK_S):
            checking = self._checks.get(digest)
            if checking is None:
                checking = self._checks[digest] = asyncio.ensure_future(self._check(digest, stored))
            if not await asyncio.shield(checking):
                return None
        try:
            os.utime(path)
        except FileNotFoundError:
            self._stored.pop(digest, None)
            return None
        return path

    async def _check(self, digest: str, stored: Stored) -> bool:
        state, path = hashlib.sha256(), self._files / digest
        try:
            size = await asyncio.to_thread(hash_into, path, state)
            good = size == stored.size and state.hexdigest() == digest
        except OSError as error:
            good = False
            _log.warning("file cannot be read", file=digest, error=str(error))
        finally:
            del self._checks[digest]
        if good:
            stored.checked_at = time.monotonic()
        elif self._stored.get(digest) is stored:
            _log.error("file on disk is not what its name says: dropped", file=digest)
            self._remove(digest)
        return good

    def reserve(self, digest: str, size: int) -> Path | None:
        """Place for a file to come; None when there is no room for it, whatever goes."""
        self._reserved.pop(digest, None)
        if not self._make_room(size):
            return None
        self._reserved[digest] = size
        return self._partial / digest

    def keep(self, digest: str) -> None:
        """Keep a file that is complete and checked in its place."""
        os.replace(self._partial / digest, self._files / digest)  # noqa: PTH105 - the same, and says that it replaces
        self._stored[digest] = Stored(self._reserved.pop(digest), time.monotonic())

    def drop(self, digest: str) -> None:
        """Give up a file that is under way."""
        self._reserved.pop(digest, None)
        (self._partial / digest).unlink(missing_ok=True)

    def _make_room(self, size: int) -> bool:
        if size + sum(self._reserved.values()) > self._max_bytes:
            return False
        while self.used_bytes + size > self._max_bytes:
            oldest = next(iter(self._stored))
            _log.info("file evicted", file=oldest, bytes=self._stored[oldest].size)
            self._remove(oldest)
            self.evictions += 1
        return True

    def _remove(self, digest: str) -> None:
        del self._stored[digest]
        (self._files / digest).unlink(missing_ok=True)
