"""Groups of 200 MB: byte for byte, how long the store is held up by them, and how much memory the service takes."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import redis

from tests.support.large_groups import large, pull_by, push_by_worker
from tests.support.rpc import connect
from tests.support.service import ServiceProcess, running_service

SAMPLES = 8
SAMPLE_BYTES = 30_000_000
"""Routed experts of one sample of 32,768 tokens: 58 layers, 8 experts, 2 bytes each."""
MOST_MEMORY = 64 << 20
"""Bytes that an rpc process may take beyond what it has at rest; a group has 240 MB."""


@contextmanager
def pings(socket: Path) -> Iterator[list[str]]:
    """Latencies of a store to a process that asks all the time; told once it is over."""
    told: list[str] = []
    command = [sys.executable, "-m", "tests.large.pings", str(socket)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        assert asking.stdout.readline() == "asking\n"
        yield told
        took = json.loads(asking.communicate()[0])
    p50, p99, most = (float(np.percentile(took, at)) for at in (50, 99, 100))
    told.append(f"PING p50 {p50:.2f} p99 {p99:.2f} longest {most:.2f} ms of {len(took)}")


def memory_of_rpc_process(service: ServiceProcess, *, most: bool) -> int:
    """Resident bytes of the one rpc process: now, or the most that it has ever had."""
    children = Path(f"/proc/{service.pid}/task/{service.pid}/children").read_text().split()
    (pid,) = [pid for pid in children if b"buffer_service" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    line = next(
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmHWM" if most else "VmRSS")
    )
    return 1_024 * int(line.split()[1])


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
@pytest.mark.parametrize("directly", [True, False], ids=["direct", "relayed"])
async def test_routed_experts_of_eight_samples(tmp_path: Path, *, directly: bool, kind: str) -> None:
    group = large("a", SAMPLES * SAMPLE_BYTES, SAMPLES)
    with running_service(tmp_path, rpc_processes=1) as service:
        rpc = connect(service.address)
        run = rpc.create(batch_groups=1)
        socket = service.data_dir / "store" / "store.sock"
        with redis.Redis(unix_socket_path=str(socket)) as store:
            with contextlib.suppress(PermissionError):
                # What others do on the machine is not the question.
                os.sched_setscheduler(store.info("server")["process_id"], os.SCHED_FIFO, os.sched_param(1))
            with pings(socket) as idle:
                await asyncio.sleep(1)
            store.slowlog_reset()
            at_rest = memory_of_rpc_process(service, most=False)
            with pings(socket) as pushing:
                began = time.perf_counter()
                (result,), _ = await push_by_worker(service.address, run.run_id, [group], directly=directly)
                pushed_s = time.perf_counter() - began
            with pings(socket) as pulling:
                began = time.perf_counter()
                (payload,) = await pull_by(kind, service.address, run.run_id, directly=directly)
                pulled_s = time.perf_counter() - began
            slow = [(entry["command"][:40], entry["duration"]) for entry in store.slowlog_get(16)]
        taken = memory_of_rpc_process(service, most=True) - at_rest
        rpc.channel.close()
    assert result.outcome == "queued"
    assert payload == group.payload
    print(
        f"\n{len(group.payload) / 1e6:.0f} MB, {'direct' if directly else 'relayed'}, {kind} client: push "
        f"{pushed_s:.2f} s, pull {pulled_s:.2f} s; the rpc process took {taken / 1e6:.0f} MB\n"
        f"  idle    {idle[0]}\n  pushing {pushing[0]}\n  pulling {pulling[0]}\n  commands over 10 ms: {slow}"
    )
    assert slow == []
    assert taken < MOST_MEMORY
