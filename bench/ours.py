"""The buffer's own side: groups pushed by the worker's pusher, pulled, committed and freed by the trainer client.

The service and the store run as `rollout-buffer serve` starts them; producer and consumer are processes of their own.
Groups are pushed without leases, as the compared queue has none. Payloads go one way or the other: the service has
everything go directly (DIRECT), and a relayed run's clients are told not to.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench import workload
from bench.measure import descendants
from bench.roles import Handler

DIRECT = ("--direct-from-bytes", "0")
"""Flags of a service whose clients have all payloads go directly."""
_START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Service:
    """A running service: where it is, its processes, and the store's socket."""

    address: str
    pids: tuple[int, ...]
    """rpc processes, supervisor and store."""
    unix_socket: str


@contextmanager
def service(directory: Path, durability: str, *flags: str) -> Iterator[Service]:
    """Start `rollout-buffer serve` on free ports, with these flags too, and stop it at the end."""
    program = Path(sys.executable).parent / "rollout-buffer"
    note = directory / "service.json"
    with (directory / "service.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(str(program), "serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"),
                *("--data-dir", str(directory), "--durability", durability, *flags),
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            deadline = time.monotonic() + _START_TIMEOUT_S
            while not note.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the service did not start; see {directory / 'service.log'}")
                time.sleep(0.05)
            told = json.loads(note.read_text())
            yield Service(told["address"], tuple(descendants(process.pid)), told["store"].removeprefix("unix://"))
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.kill(process.pid, signal.SIGKILL)


def producer(address: str, way: str) -> dict[str, Handler]:
    """Command `produce`: encode and push every group of a size, each once."""
    from buffer_wire import layout
    from buffer_wire.payloads.writer import PayloadWriter
    from rollout_workers.counters import Counters
    from rollout_workers.service.client import ServiceClient
    from rollout_workers.service.pusher import Pusher

    async def produce(run_id: str, size: workload.Size) -> None:
        client = ServiceClient(address, run_id, instance_id="bench", timeout_s=60.0)
        writer = PayloadWriter(run_id, "bench", partial(client.write_access, "bench"))
        counters = Counters()
        pusher = Pusher(client, counters, writer if way == "direct" else None, window_bytes=64 << 20)
        columns = workload.arrays(size)
        runner = asyncio.create_task(pusher.run())

        async def push(first: int) -> None:
            # Each of these pushes one group after another, as a worker's slots do.
            for i in range(first, size.groups, slots):
                header = workload.header(size, f"t{i}", 0)
                result = await pusher.push(header, layout.payload_pieces(columns))
                if result.outcome != "queued":
                    raise RuntimeError(f"group {i} was answered {result}")

        slots = 8 * size.bundle
        async with asyncio.TaskGroup() as group:
            for first in range(slots):
                group.create_task(push(first))
        runner.cancel()
        await asyncio.gather(runner, return_exceptions=True)
        await writer.close()
        await client.close()
        if set(counters.pushed_bytes) != {way}:
            raise RuntimeError(f"not all went the {way} way: {dict(counters.pushed_bytes)}")

    return {"produce": lambda run_id, size: asyncio.run(produce(run_id, size))}


def consumer(address: str, way: str) -> dict[str, Handler]:
    """Commands `prepare` (make a run) and `consume` (pull, read, commit and free every batch; returns groups)."""
    from trainer_client import BufferClient, ClientOptions
    from trainer_client.policy import Policy

    client = BufferClient(address, ClientOptions(direct_payloads=way == "direct"))

    def prepare(run_id: str, size: workload.Size) -> None:
        client.create_run(
            run_id,
            Policy(
                batch_groups=size.batch_groups,
                # Room for all: the benchmark measures moving, not blocking.
                max_queued_groups=size.groups,
                overflow_action="block",
            ),
        )

    def consume(run_id: str, size: workload.Size) -> int:
        term = client.resume(run_id, next_step=0).term
        seen = 0
        for step in range(size.groups // size.batch_groups):
            batch = client.pull(run_id, term=term, step=step, timeout_s=120.0)
            for group in batch.groups:
                seen += len(group.columns) and 1
            client.commit(run_id, term=term, through_step=step)
            client.checkpoint(run_id, term=term, through_step=step)
        if not client.ledger(run_id).balanced:
            raise RuntimeError("the ledgers do not balance")
        return seen

    return {"prepare": prepare, "consume": consume}
