"""Janitor of a replica: tidies up expired leases and trash, the payloads of pushes that were given up, and memory."""

import asyncio
import random
from collections.abc import Sequence

import structlog

from buffer_service import commands
from buffer_service.domain.ports import RunStore
from buffer_service.rpc.flow.room import Room
from buffer_wire.errors import StoreFault, UnknownRun
from buffer_wire.malloc import give_back

MEMORY_EVERY_S = 2.0
MEMORY_TIMES = 5
"""Number of times that memory is given back after the last message: gRPC frees some only when connections end."""
QUIET_BYTES = 16 << 20
"""Bytes of messages below which a look finds the process quiet; so many move before memory is worth giving back."""

log = structlog.get_logger(__name__)


class Janitor:
    """Loops that end when `close` is called; nothing that was handed over before is forgotten."""

    def __init__(self, store: RunStore, sweep_every_s: float = 1.0) -> None:
        self._store = store
        self._sweep_every_s = sweep_every_s
        self._abandoned: asyncio.Queue[tuple[str, list[str]] | None] = asyncio.Queue()
        self._closing = asyncio.Event()

    def abandon(self, run_id: str, payload_keys: list[str]) -> None:
        """Have the payloads of a blocked push deleted. Never waits, so that a cancelled stream can call it."""
        self._abandoned.put_nowait((run_id, payload_keys))

    async def delete_abandoned(self) -> None:
        """Delete the payloads of abandoned pushes; runs until closed."""
        while (item := await self._abandoned.get()) is not None:
            run_id, keys = item
            try:
                await self._store.call(commands.abandon_push(run_id, keys))
            except StoreFault as error:
                # The sweep finds them later, as stale staging.
                log.warning("abandoned payloads stay for the sweep", run=run_id, payloads=len(keys), why=error.message)
            except UnknownRun:
                # It was deleted with everything that was stored for it.
                continue

    async def sweep(self) -> None:
        """Sweep the store again and again; runs until closed."""
        said = ""
        while not self._closing.is_set():
            try:
                await self._store.sweep()
                said = ""
            except StoreFault as error:
                # Once: a store may be full for hours.
                if error.reason != said:
                    log.warning("sweep failed", why=error.message)
                said = error.reason
            await self._closes_within(self._sweep_every_s * random.uniform(0.8, 1.2))  # noqa: S311 - jitter

    async def give_memory_back(self, rooms: Sequence[Room]) -> None:
        """Give memory back to the system; runs until closed.

        malloc keeps what is freed (buffer_wire/malloc.py), for as long as it is used again.
        """
        seen = given_back = times = 0
        while not await self._closes_within(MEMORY_EVERY_S):
            moved = sum(room.moved_bytes for room in rooms)
            if moved - seen < QUIET_BYTES:
                if moved - given_back >= QUIET_BYTES:
                    times, given_back = MEMORY_TIMES, moved
                if times:
                    give_back()
                    times -= 1
            seen = moved

    async def _closes_within(self, wait_s: float) -> bool:
        try:
            async with asyncio.timeout(wait_s):
                return await self._closing.wait()
        except TimeoutError:
            return False

    def close(self) -> None:
        """End the loops, once the payloads that were abandoned before are deleted."""
        self._closing.set()
        self._abandoned.put_nowait(None)
