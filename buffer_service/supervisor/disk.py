"""Disk of the embedded store: where it has little room left the store refuses writes, and goes on reading.

Data are kept by other means: a write that could not be appended is acknowledged by nobody (store/transport). This keeps
the store of durability `host` from ending with every write that its disk has no room for. It also keeps pulls of
batches that are there from being refused with the calls that would change something.
"""

import asyncio
import contextlib
import os

import structlog

from buffer_service.settings import Durability
from buffer_service.store.embedded.server import EmbeddedStore
from buffer_wire.errors import StoreFault

log = structlog.get_logger(__name__)

POLL_S = 0.1
RESERVE_BYTES = 64 << 20
"""Room that is left to others: the next log line, service.json, the shrinking of the append-only file."""
LARGEST_SHARE = 20
"""Divisor of a disk's size: no more than that part of a small disk is reserved."""


def has_room(store: EmbeddedStore) -> bool:
    """True when the store may write; where it refuses to, only once there is a quarter more than must be left.

    Also True where nobody can tell: a folder that is not there is for others to complain of.
    """
    try:
        disk = os.statvfs(store.data_dir)
    except OSError:
        return True
    reserve = min(RESERVE_BYTES, disk.f_blocks * disk.f_frsize // LARGEST_SHARE)
    return disk.f_bavail * disk.f_frsize >= reserve * (1.25 if store.refuses_writes else 1.0)


async def watch(store: EmbeddedStore) -> None:
    """Tell the store whether it may write, until cancelled."""
    if store.durability is Durability.MEMORY:
        return
    while True:
        room = has_room(store)
        if store.refuses_writes == room:
            # One that is down is told when it starts.
            with contextlib.suppress(StoreFault):
                await store.refuse_writes(refused=not room)
                if room:
                    log.info("the store takes writes again: its disk has room", folder=str(store.data_dir))
                else:
                    log.error("the store refuses writes: its disk has no room", folder=str(store.data_dir))
        await asyncio.sleep(POLL_S)
