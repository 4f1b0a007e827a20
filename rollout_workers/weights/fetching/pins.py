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
    """Keeps `directory` until `release`."""

    def __init__(self, directory: Path, lock: FileLock) -> None:
        self.directory = directory
        self._lock = lock

    @classmethod
    def at(cls, directory: Path) -> Self | None:
        """A pin; None when there is no directory, or it is being removed."""
        lock = FileLock.take(_lock_of(directory), shared=True) if directory.is_dir() else None
        if lock is None:
            return None
        if not directory.is_dir():
            lock.release()
            return None
        return cls(directory, lock)

    def touch(self) -> None:
        """Mark the directory as asked for now, by its time of modification."""
        now = time.time_ns()
        with contextlib.suppress(OSError):  # It may be another user's.
            os.utime(self.directory, ns=(now, now))

    def release(self) -> None:
        """Let it be removed. To be called once."""
        self._lock.release()


def remove_unpinned(directory: Path, aside: Path) -> None:
    """Remove `directory` unless it is pinned, by way of `aside`, which is overwritten. Blocking."""
    lock = FileLock.take(_lock_of(directory), shared=False)
    if lock is None:
        return
    try:
        shutil.rmtree(aside, ignore_errors=True)
        with contextlib.suppress(OSError):
            directory.rename(aside)
            _lock_of(directory).unlink(missing_ok=True)
    finally:
        lock.release()
    shutil.rmtree(aside, ignore_errors=True)


def _lock_of(directory: Path) -> Path:
    return directory.parent / LOCKS / directory.name
