"""Keeps the embedded store's append-only file whole on a disk that fills up.

Valkey 9.1 and Redis 7 open the file that they write after a rewrite without O_APPEND (aof.c). When the disk has room
for a part of a write, the server takes that part back, but not its own position in the file. What it writes next lies
behind a hole, with which it does not start again, and the next such failure cuts off what was acknowledged. With
O_APPEND every write goes to the file's end, so this sets the flag on the server's own descriptor.
"""

import asyncio
import ctypes
import errno
import fcntl
import os
from pathlib import Path

import structlog

from buffer_service.settings import Durability
from buffer_service.store.embedded.server import EmbeddedStore

log = structlog.get_logger(__name__)

POLL_S = 0.1
FOLDER = "appendonlydir"
PIDFD_GETFD = 438
"""Number of the system call pidfd_getfd (Linux 5.6), the same on every architecture."""

_GONE = frozenset({errno.ENOENT, errno.ESRCH, errno.EBADF})
"""Errors of a folder, a process or a descriptor that is not there yet, or no longer."""


async def watch(store: EmbeddedStore) -> None:
    """Set O_APPEND on each file that the store appends to, until cancelled; warns once where that is forbidden."""
    if store.durability is not Durability.PROCESS:
        # One of durability `host` ends with a write that fails, and opens the file for appending when it starts.
        return
    seen: tuple[int | None, int] = (None, 0)
    while True:
        try:
            now = (store.pid, (store.data_dir / FOLDER).stat().st_mtime_ns)
            if now != seen and now[0] is not None:
                append_always(now[0])
            seen = now
        except OSError as error:
            if error.errno not in _GONE:
                log.warning(
                    "the store's append-only file may be damaged if its disk fills up after a rewrite of the file; "
                    "--durability host is safe",
                    why=f"O_APPEND cannot be set on its descriptor ({error}): a container's seccomp profile may forbid "
                    "it, or the kernel is older than 5.6",
                )
                return
            seen = (None, 0)
        await asyncio.sleep(POLL_S)


def append_always(pid: int) -> None:
    """Set O_APPEND on the append-only files that a process has open.

    Raises OSError: it is not allowed, the kernel cannot, or something went away meanwhile.
    """
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        if entry.readlink().suffix == ".aof":
            descriptor = _same_description(pid, int(entry.name))
            try:
                flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
                fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_APPEND)
            finally:
                os.close(descriptor)


def _same_description(pid: int, number: int) -> int:
    """A descriptor of this process for what another one has open under that number, flags and position shared."""
    process = os.pidfd_open(pid)
    try:
        syscall = ctypes.CDLL(None, use_errno=True).syscall
        descriptor: int = syscall(PIDFD_GETFD, process, number, 0)
        if descriptor < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return descriptor
    finally:
        os.close(process)
