"""Groups of many megabytes, as a worker pushes them and a trainer pulls them."""

import asyncio
from collections.abc import Sequence
from functools import partial

import numpy as np

from buffer_wire import layout
from buffer_wire.payloads.writer import PayloadWriter
from rollout_buffer.v1 import groups_pb2
from rollout_workers.counters import Counters
from rollout_workers.service.client import ServiceClient
from rollout_workers.service.parcels import PushResult
from rollout_workers.service.pusher import Pusher
from tests.support.rpc import make_group
from trainer_client import AsyncBufferClient, BufferClient, ClientOptions


def large(task_id: str, size: int = 20 << 20, samples: int = 2) -> groups_pb2.Group:
    """A group with a column that has about as many bytes for its tokens."""
    group = make_group(task_id, lengths=(6,) * samples)
    tokens = 6 * samples
    rows = np.random.default_rng(len(task_id)).integers(0, 256, (tokens, size // tokens), np.uint8)
    group.header.columns.append(layout.column_of("routed_experts", rows, groups_pb2.AXIS_TOKEN))
    group.payload = b"".join((group.payload, bytes(-len(group.payload) % 8), rows.tobytes()))
    return group


async def push_by_worker(
    address: str, run_id: str, groups: Sequence[groups_pb2.Group], *, directly: bool = True
) -> tuple[list[PushResult], int]:
    """Results of a worker's pushes, and the bytes of those that it wrote to the store itself."""
    client = ServiceClient(address, run_id, instance_id="i", timeout_s=60)
    writer = PayloadWriter(run_id, "w", partial(client.write_access, "w")) if directly else None
    counters = Counters()
    pusher = Pusher(client, counters, writer)
    running = asyncio.create_task(pusher.run())
    results = [await pusher.push(group.header, group.payload) for group in groups]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    if writer is not None:
        await writer.close()
    await client.close()
    return results, counters.pushed_bytes["direct"]


async def pull_by(kind: str, address: str, run_id: str, *, directly: bool = True) -> list[memoryview]:
    """Payloads of the first step's groups, as an `asyncio` or a `blocking` client has them."""
    options = ClientOptions(direct_payloads=directly)
    if kind == "asyncio":
        async with AsyncBufferClient(address, options) as client:
            batch = await client.pull(run_id, term=1, step=0, timeout_s=60)
    else:
        with BufferClient(address, options) as blocking:
            batch = await asyncio.to_thread(blocking.pull, run_id, term=1, step=0, timeout_s=60)
    return [memoryview(group.payload) for group in batch.groups]
