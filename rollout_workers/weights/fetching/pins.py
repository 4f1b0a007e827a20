"""Directories of versions that somebody loads or uses, kept from being removed by this worker or by another one.

A pin is a shared lock (locks.py) on a file beside the directory. Where there are no locks, directories are pinned
within the process only.

Invariant: a directory leaves its place before anything in it is removed: what is in the place is complete.
"""

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import Self

from rollout_workers.weights.fetching.locks import FileLock

LOCKS = ".pins"
"""Directory of the locks, beside those that they are for."""


class Pin:
    """Keeps the directory at `place` until `release`."""

    def __init__(self, place: Path, lock: FileLock) -> None:
        self.place = place
        self._lock = lock

    @classmethod
    def at(cls, place: Path) -> Self | None:
        """A pin; None when there is no directory, or it is being removed."""
        lock = FileLock.take(_lock_of(place), shared=True) if place.is_dir() else None
        if lock is None:
            return None
        if not place.is_dir():
            lock.release()
            return None
        return cls(place, lock)

    def touch(self) -> None:
        """Mark the directory as asked for now, by its time of modification."""
        now = time.time_ns()
        with contextlib.suppress(OSError):  # It may be another user's.
            os.utime(self.place, ns=(now, now))

    def release(self) -> None:
        """Let it be removed. To be called once."""
        self._lock.release()


def remove_unpinned(place: Path, aside: Path) -> None:
    """Remove the directory at `place` unless it is pinned, by way of `aside`, which is overwritten. Blocking."""
    lock = FileLock.take(_lock_of(place), shared=False)
    if lock is None:
        return
    try:
        shutil.rmtree(aside, ignore_errors=True)
        with contextlib.suppress(OSError):
            place.rename(aside)
            _lock_of(place).unlink(missing_ok=True)
    finally:
        lock.release()
    shutil.rmtree(aside, ignore_errors=True)


def _lock_of(place: Path) -> Path:
    return place.parent / LOCKS / place.name
