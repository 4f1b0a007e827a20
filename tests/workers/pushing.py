"""A pusher that works for a fake of the service."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from buffer_wire.connection.access import Access
from buffer_wire.payloads.writer import PayloadWriter
from rollout_buffer.v1 import groups_pb2
from rollout_workers.counters import Counters
from rollout_workers.generation.samples import GroupProgress
from rollout_workers.service.client import ServiceClient
from rollout_workers.service.pusher import Pusher
from rollout_workers.versions import BASE
from tests.workers.building import generated, lease, task
from tests.workers.fake_service import FakeService, FakeTask

if TYPE_CHECKING:
    from rollout_workers.service.parcels import PushResult


class Pushing:
    def __init__(self, fake: FakeService, pusher: Pusher, counters: Counters) -> None:
        self.fake = fake
        self.pusher = pusher
        self.counters = counters

    def group(self, task_id: str, tokens: int = 4) -> tuple[groups_pb2.GroupHeader, bytes]:
        of = task(task_id, group_size=1)
        self.fake.tasks.setdefault(task_id, FakeTask(of, attempt=1, leased_to="w.e0@i"))
        progress = GroupProgress(lease(of), np.array([1, 2, 3], np.int32))
        progress.samples[0].append(generated(0, list(range(tokens))), lambda _: BASE)
        header, payload = progress.to_group([1.0], "w")
        return header, b"".join(payload)

    def push(self, task_id: str, tokens: int = 4) -> "asyncio.Task[PushResult]":
        return asyncio.create_task(self.pusher.push(*self.group(task_id, tokens)))

    async def push_all(self, *task_ids: str, tokens: int = 4) -> list[str]:
        pushes = [self.push(task_id, tokens) for task_id in task_ids]
        return [(await push).outcome for push in pushes]


@asynccontextmanager
async def pushing(
    fake: FakeService, access: Access | None = None, *, directly: bool = False, **options: Any
) -> AsyncIterator[Pushing]:
    service = ServiceClient(fake.address, "r", instance_id="i", timeout_s=20, access=access)
    counters = Counters()
    writer = PayloadWriter("r", "w", partial(service.write_access, "w")) if directly else None
    pusher = Pusher(service, counters, writer, **options)
    running = asyncio.create_task(pusher.run())
    async with asyncio.timeout(30):
        yield Pushing(fake, pusher, counters)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    if writer is not None:
        await writer.close()
    await service.close()
