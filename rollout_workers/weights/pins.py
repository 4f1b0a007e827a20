"""Directories of versions that somebody loads or uses, kept from being removed by this worker or by another one.

A pin is a shared lock (flock) on a file beside the directory, so it ends with the process that holds it, however that
ends, and is seen by other machines where the file system has such locks. Where it has none, directories are pinned
within the process only.

Invariant: a directory leaves its place before anything in it is removed: what is in the place is complete.
"""

import contextlib
import fcntl
import os
import shutil
import time
from pathlib import Path
from typing import Self

LOCKS = ".pins"
"""Directory of the locks, beside those that they are for."""


class Pin:
    """Keeps the directory at `place` until `release`."""

    def __init__(self, place: Path, descriptor: int | None) -> None:
        self.place = place
        self._descriptor = descriptor

    @classmethod
    def at(cls, place: Path) -> Self | None:
        """A pin; None when there is no directory, or it is being removed."""
        if not place.is_dir():
            return None
        lock = _lock_of(place)
        pin = cls(place, _opened(lock))
        if not (_locked(pin._descriptor, lock, fcntl.LOCK_SH) and place.is_dir()):
            pin.release()
            return None
        return pin

    def touch(self) -> None:
        """Mark the directory as asked for now, by its time of modification."""
        now = time.time_ns()
        with contextlib.suppress(OSError):  # It may be another user's.
            os.utime(self.place, ns=(now, now))

    def release(self) -> None:
        """Let it be removed. To be called once."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                # A forked process may have the descriptor still: closing it here would not unlock it.
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)


def remove_unpinned(place: Path, aside: Path) -> None:
    """Remove the directory at `place` unless it is pinned, by way of `aside`, which is overwritten. Blocking."""
    lock = _lock_of(place)
    descriptor = _opened(lock)
    try:
        if not _locked(descriptor, lock, fcntl.LOCK_EX):
            return
        shutil.rmtree(aside, ignore_errors=True)
        with contextlib.suppress(OSError):
            place.rename(aside)
            lock.unlink(missing_ok=True)
    finally:
        if descriptor is not None:
            os.close(descriptor)
    shutil.rmtree(aside, ignore_errors=True)


def _lock_of(place: Path) -> Path:
    return place.parent / LOCKS / place.name


def _opened(lock: Path) -> int | None:
    """None where there can be no lock: another user's directory, or a disk that is full, which must not stay so."""
    try:
        lock.parent.mkdir(exist_ok=True)
        return os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        return None


def _locked(descriptor: int | None, lock: Path, kind: int) -> bool:
    """False when somebody else has a lock that excludes this one, or the file is no longer the one at `lock`."""
    if descriptor is None:
        return True
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # The file system has no locks.
    try:
        return os.path.samestat(os.fstat(descriptor), lock.stat())
    except FileNotFoundError:
        return False
