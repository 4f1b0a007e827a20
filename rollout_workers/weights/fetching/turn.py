"""Turns to bring a version: of workers that share a directory one brings it, and the others wait for that.

On a shared volume whose files cannot be linked every worker would copy the whole model, and all copies but one would be
thrown away. This only saves work: a version appears by a rename, whoever else brings it. So where there are no locks,
or their holder hangs, a worker goes on without one. Its lock is not that of the pins (pins.py): one that hangs must not
keep others from using what they have brought themselves.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rollout_workers.weights.fetching.locks import FileLock

LOCK = ".lock"
_POLL_S = 0.2


@asynccontextmanager
async def turn(directory: Path, *, wait_s: float) -> AsyncIterator[None]:
    """Wait, for at most `wait_s`, until nobody else brings `directory` or it is there."""
    path = directory.with_name(f".{directory.name}{LOCK}")
    until = time.monotonic() + wait_s
    lock = FileLock.take(path, shared=False)
    while lock is None and not there(directory) and time.monotonic() < until:
        await asyncio.sleep(_POLL_S)
        # Another file may be there by now: who has had its turn removes it.
        lock = FileLock.take(path, shared=False)
    try:
        yield
    finally:
        if lock is not None:
            with contextlib.suppress(OSError):  # It may be another user's.
                path.unlink(missing_ok=True)
            lock.release()


def there(directory: Path) -> bool:
    """True if a directory is there, by a new look: a client of NFS remembers for a while what was not."""
    return directory.name in os.listdir(directory.parent)  # noqa: PTH208 - iterdir is lazy
