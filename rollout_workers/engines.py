"""Hosts of a worker's engines: of running servers, servers that the worker starts, or simulated ones.

A host opens its engine, opens it again after a failure, and closes what it owns.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from rollout_workers.engine.sglang.hosts import LaunchedHost, RemoteHost
from rollout_workers.engine.simulated.host import SimulatedHost
from rollout_workers.engine.types import Engine
from rollout_workers.options import WorkerOptions
from rollout_workers.slots.slot import EngineSlot


class EngineHost(Protocol):
    """Owner of one engine."""

    base_model: str | None
    """Model that holds version 0; None when only the engine can say."""

    @property
    def ended(self) -> bool:
        """True when a process that the worker owns has ended."""
        ...

    @property
    def why_ended(self) -> str:
        """Account of the end of such a process, as far as it is known: its exit code, and the end of its log."""
        ...

    async def open(self) -> Engine:
        """Start if need be, and connect. Raises EngineError."""
        ...

    async def revive(self) -> Engine:
        """Make one attempt, after a failure, to have it running and connected again. Raises EngineError."""
        ...

    async def close(self) -> None:
        """Disconnect; end what the worker started."""
        ...


def hosts_of(options: WorkerOptions) -> list[EngineHost]:
    """Hosts, one for each engine that the options name; engines that a router lists are not known here."""
    if options.launch is not None:
        return [LaunchedHost(i, options) for i in range(options.launch.engines)]
    if options.simulated is not None:
        return [SimulatedHost(i, options) for i in range(options.simulated.engines)]
    return [RemoteHost(url, options) for url in options.engine_urls]


@asynccontextmanager
async def open_engines(hosts: Sequence[EngineHost], worker_id: str) -> AsyncIterator[list[EngineSlot]]:
    """Slots of all engines, opened side by side; closed again whatever happens. Raises the EngineErrors as a group."""
    try:
        async with asyncio.TaskGroup() as group:
            opening = [group.create_task(open_slot(f"{worker_id}.e{i}", host)) for i, host in enumerate(hosts)]
        yield [opened.result() for opened in opening]
    finally:
        await asyncio.gather(*(host.close() for host in hosts), return_exceptions=True)


async def open_slot(engine_id: str, host: EngineHost) -> EngineSlot:
    """Slot of one engine, which is opened. Raises EngineError."""
    engine = await host.open()
    info = await engine.info()
    slot = EngineSlot(engine_id, engine, info, base_model=host.base_model)
    await slot.refresh()
    if slot.base_model is None and slot.pristine and info.model_path:
        slot.base_model = info.model_path
    return slot
