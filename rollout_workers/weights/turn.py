"""One at a time: of workers that share a directory one brings a version into it, and the others wait for that.

On a shared volume whose files cannot be linked every worker would copy the whole model, and all copies but one would
be thrown away. This only saves work: a version appears by a rename, whoever else brings it. So where locks do not work,
or their holder hangs, a worker goes on without one. The kernel releases the lock of a process that ends.
"""

import asyncio
import errno
import fcntl
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

LOCK = ".lock"
_POLL_S = 0.2
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
"""From file systems that have none."""


@asynccontextmanager
async def turn(place: Path, *, wait_s: float) -> AsyncIterator[None]:
    """Wait, for at most `wait_s`, until nobody else brings `place` or it is there. Raises OSError."""
    path = place.with_name(f".{place.name}{LOCK}")
    until = time.monotonic() + wait_s
    try:
        lock = path.open("ab")
    except PermissionError:  # Another user's.
        yield
        return
    with lock:
        mine = await asyncio.to_thread(_take, lock)
        while not mine and not there(place) and time.monotonic() < until:
            await asyncio.sleep(_POLL_S)
            mine = await asyncio.to_thread(_take, lock)
        try:
            yield
        finally:
            if mine:
                path.unlink(missing_ok=True)


def there(place: Path) -> bool:
    """Whether a directory is there, by a new look: a client of NFS remembers for a while what was not."""
    return place.name in os.listdir(place.parent)  # noqa: PTH208 - iterdir is lazy


def _take(lock: IO[bytes]) -> bool:
    try:
        # As one over NFS too, where Linux makes a lock of the whole file's range of it.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return True
        if error.errno in {errno.EWOULDBLOCK, errno.EACCES}:
            return False
        raise
    return True
