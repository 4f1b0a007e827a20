"""A real service under random messages to every method and to the admin page (`make fuzz`).

FUZZ_SEED repeats a run's messages (which of them meet whom is up to the machine), FUZZ_MESSAGES says how many. Fails on
an answer INTERNAL or UNKNOWN, on a traceback or an error in the service's log, and on a process that was restarted.
Fails too where memory, descriptors or keys of the store are not given back, or a run does not work afterwards.
"""

import asyncio
import os
import secrets
import sys
import tempfile
import time
from pathlib import Path

import redis
import uvloop

from rollout_buffer.v1 import runs_pb2
from tests.fuzz.calls import Lane
from tests.fuzz.life import check_and_delete
from tests.fuzz.shrink import shrunk
from tests.fuzz.sockets import HttpLane
from tests.fuzz.verdicts import Verdicts
from tests.fuzz.watch import Watch
from tests.support.rpc import TIMEOUT_S, Rpc, connect
from tests.support.service import ServiceProcess, running_service

MESSAGES = 250_000
CALLERS, PUSHERS, BROWSERS = 24, 4, 8

SETTINGS = {
    "rpc_processes": 1,
    "log_format": "json",
    # Caches would look like growth until they are full.
    "recent_bytes": 1 << 20,
    "max_streams": 64,
}


async def fuzz(service: ServiceProcess, seed: int, verdicts: Verdicts, watch: Watch) -> None:
    """Send the budget."""
    admin = service.admin.removeprefix("http://")
    store = redis.Redis(unix_socket_path=str(next(service.data_dir.rglob("*.sock"))))
    lanes = [Lane(service.address, store, number, seed, verdicts) for number in range(CALLERS + PUSHERS)]
    browsers = [HttpLane(admin, service.address, number, seed, verdicts) for number in range(BROWSERS)]
    sampling = asyncio.create_task(watch.sample(verdicts))
    async with asyncio.TaskGroup() as tasks:
        for lane in lanes[:CALLERS]:
            tasks.create_task(lane.call_on())
        for lane in lanes[CALLERS:]:
            tasks.create_task(lane.push_on())
        for browser in browsers:
            tasks.create_task(browser.send_on())
    sampling.cancel()
    for lane in lanes:
        await lane.close()
    store.close()


def main() -> int:
    """Exit status."""
    seed = int(os.environ.get("FUZZ_SEED") or secrets.randbits(32))
    verdicts = Verdicts(int(os.environ.get("FUZZ_MESSAGES") or MESSAGES))
    print(f"fuzz: seed {seed}, {verdicts.budget} messages", flush=True)
    with tempfile.TemporaryDirectory() as folder, running_service(Path(folder), **SETTINGS) as service:
        rpc = connect(service.address)
        service.metric("nothing")  # The page has connected to the store.
        watch = Watch(service)
        began = time.monotonic()
        uvloop.run(fuzz(service, seed, verdicts, watch))
        took = time.monotonic() - began
        for kind, failure in verdicts.failures.items():
            verdicts.failures[kind] = shrunk(rpc.channel, failure)
        check_and_delete(rpc, service.admin, all_runs(rpc), verdicts)
        rpc.channel.close()
        asyncio.run(watch.check(verdicts))
        sent = verdicts.sent.total()
        print(f"fuzz: {sent} messages in {took:.0f} s, {sent / took:.0f} a second: {dict(verdicts.sent)}")
        print(f"fuzz: MiB at the end {rounded(watch.resident())}, grown in the second half {rounded(watch.grown())}")
    if os.environ.get("FUZZ_CODES"):
        for (method, code), count in sorted(verdicts.codes.items()):
            print(f"    {method:28} {code:22} {count:9}")
    for failure in verdicts.failures.values():
        print(f"\nFAILED {failure}")
    if verdicts.failures:
        print(f"\nfuzz: {len(verdicts.failures)} kinds of failures; again with FUZZ_SEED={seed}")
    return 1 if verdicts.failures else 0


def all_runs(rpc: Rpc) -> list[str]:
    """List the runs of the clients, and those that messages made under names of their own."""
    return list(rpc.runs.ListRuns(runs_pb2.ListRunsRequest(), timeout=TIMEOUT_S).run_ids)


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 1) for name, value in values.items()}


if __name__ == "__main__":
    sys.exit(main())
