"""Locks of files (flock), by which workers that share a directory know of each other.

The kernel releases the locks of a process that ends, however it ends; other machines see them where the file system has
such locks. Where there can be none (no locks there, another user's file, a full disk) everybody gets every lock: what
uses them has to be right without.
"""

import contextlib
import errno
import fcntl
import os
from pathlib import Path
from typing import Self

_TAKEN = {errno.EWOULDBLOCK, errno.EACCES}
"""Error numbers of a lock that somebody else has; the second comes from some network file systems."""


class FileLock:
    """A lock that was taken, until `release`."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    @classmethod
    def take(cls, path: Path, *, shared: bool) -> Self | None:
        """The lock of the file at `path`, which is made; None when somebody else has one that excludes it."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return cls(None)
        lock = cls(descriptor)
        if _locked(descriptor, path, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
            return lock
        lock.release()
        return None

    def release(self) -> None:
        """Let others take it. To be called once."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                # A forked process may have the descriptor still: closing it here would not unlock it.
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)


def _locked(descriptor: int, path: Path, kind: int) -> bool:
    """False when somebody else has the lock, or the file is no longer the one at `path`."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _TAKEN
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
