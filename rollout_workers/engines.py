"""Engines of a worker, opened: which hosts its options name, and the slot of each engine."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from rollout_workers.engine.hosts import EngineHost
from rollout_workers.options import WorkerOptions
from rollout_workers.slots.slot import EngineSlot


def hosts_of(options: WorkerOptions) -> list[EngineHost]:
    """Hosts, one for each engine that the options name; engines that a router lists are not known here."""
    hosts = options.kind.hosts
    return [hosts.host_at(url, options) for url in options.engine_urls] or list(hosts.own_hosts(options))


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
