"""Data directory of the embedded store, locked for one service at a time.

Invariants: the lock is an flock on `lock` in the folder, shared with the server child. So it is free only after both
the service and its server are gone. The file names the pid of the service that holds it.
"""

import asyncio
import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import Self

from buffer_wire.errors import StoreUnsuitable

POLL_S = 0.02

LONGEST_SOCKET_PATH = 100
"""Bytes of a unix socket's path that every system takes (Linux: 107)."""


class DataDirectory:
    """A locked folder. `acquire` it, `release` it; `fileno` is the lock, to be inherited by the server."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    async def acquire(cls, path: Path, *, wait_s: float) -> Self:
        """Create the folder if need be and lock it.

        Waits up to `wait_s` for the server of a service that has died. Raises StoreUnsuitable, naming the pid of a
        service that lives.
        """
        path, lock = _open(path)
        try:
            await _lock(lock, path, time.monotonic() + wait_s)
            # On a full disk whoever comes next is told no pid.
            with contextlib.suppress(OSError):
                os.ftruncate(lock, 0)
                os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            os.close(lock)
            raise
        return cls(path, lock)

    def fileno(self) -> int:
        """Descriptor of the lock."""
        return self._lock

    def release(self) -> None:
        """Give the lock back; a server that still inherits it keeps it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _open(path: Path) -> tuple[Path, int]:
    path = path.absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path, os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreUnsuitable("embedded", f"its data directory {path} cannot be used: {error}") from error


async def _lock(lock: int, path: Path, deadline: float) -> None:
    while not _try_lock(lock):
        holder = _holder(lock)
        if _alive(holder) or time.monotonic() > deadline:
            raise StoreUnsuitable(
                "embedded",
                f"its data directory {path} is in use by process {holder}; stop that service, or give this one a "
                "data directory of its own",
            )
        await asyncio.sleep(POLL_S)


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(lock: int) -> int:
    written = os.pread(lock, 32, 0).strip()
    return int(written) if written.isdigit() else 0


def _alive(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
