"""What a replica tidies up beside its RPCs: expired leases and trash, and the payloads of pushes that were given up."""

import asyncio
import random

import structlog

from buffer_service.domain.ports import RunStore
from buffer_wire.errors import StoreFault, UnknownRun

log = structlog.get_logger(__name__)


class Janitor:
    """Two loops that end when `close` is called; nothing that was handed over before is forgotten."""

    def __init__(self, store: RunStore, sweep_every_s: float = 1.0) -> None:
        self._store = store
        self._sweep_every_s = sweep_every_s
        self._abandoned: asyncio.Queue[tuple[str, list[str]] | None] = asyncio.Queue()
        self._closing = asyncio.Event()

    def abandon(self, run_id: str, payload_keys: list[str]) -> None:
        """Have the payloads of a blocked push deleted. Never waits, so that a cancelled stream can call it."""
        self._abandoned.put_nowait((run_id, payload_keys))

    async def delete_abandoned(self) -> None:
        """Run until closed."""
        while (item := await self._abandoned.get()) is not None:
            run_id, keys = item
            try:
                await self._store.abandon_push(run_id, keys)
            except StoreFault as error:
                # The sweep finds them later, as stale staging.
                log.warning("abandoned payloads stay for the sweep", run=run_id, payloads=len(keys), why=error.message)
            except UnknownRun:
                # It was deleted with everything that was stored for it.
                continue

    async def sweep(self) -> None:
        """Run until closed."""
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
            try:
                async with asyncio.timeout(self._sweep_every_s * random.uniform(0.8, 1.2)):  # noqa: S311 - jitter
                    await self._closing.wait()
            except TimeoutError:
                continue

    def close(self) -> None:
        """End both loops after what is queued."""
        self._closing.set()
        self._abandoned.put_nowait(None)
