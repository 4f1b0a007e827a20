"""Every boundary under random and damaged input (`make fuzz`): a real service under messages to every method and to
its admin page, and the guided targets of tests/fuzz/guided.

--seed repeats a run's messages (which of them meet whom is up to the machine), --messages says how many. Fails on an
answer INTERNAL or UNKNOWN, on a traceback or an error in the service's log, and on a process that was restarted. Fails
too where memory, descriptors or keys of the store are not given back, or a run does not work afterwards.
"""

import argparse
import asyncio
import secrets
import sys
import tempfile
import time
from pathlib import Path

import redis
import uvloop

from rollout_buffer.v1 import runs_pb2
from tests.fuzz.calls import Lane
from tests.fuzz.guided import campaign
from tests.fuzz.guided.targets import TARGETS
from tests.fuzz.life import check_and_delete
from tests.fuzz.shrink import shrunk
from tests.fuzz.sockets import HttpLane
from tests.fuzz.verdicts import Verdicts
from tests.fuzz.watch import Watch
from tests.support.rpc import TIMEOUT_S, Rpc, connect
from tests.support.service import ServiceProcess, running_service

MESSAGES = 60_000
"""Messages of the short form, which takes less than a minute on two quiet cores."""
GUIDED = 0.2
"""Share of the guided targets; the rest are the service's."""
SERVICE = "service"
CALLERS, PUSHERS, BROWSERS = 24, 4, 8

SETTINGS = {
    "rpc_processes": 1,
    "log_format": "json",
    # Caches would look like growth until they are full.
    "recent_bytes": 1 << 20,
    "max_streams": 64,
    # An operator's bounds, which policies meet.
    "max_run_groups": 1 << 20,
    "max_run_tokens": 1 << 40,
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
    options = _options()
    names = options.only or [SERVICE, *TARGETS]
    print(f"fuzz: seed {options.seed}, {options.messages} messages", flush=True)
    failed = _guided([name for name in names if name in TARGETS], options)
    if SERVICE in names:
        failed += _service(options)
    if failed:
        print(f"\nfuzz: {failed} kinds of failures; again with --seed {options.seed}")
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("fuzz")
    parser.add_argument("--messages", type=int, default=MESSAGES, help="of all together")
    parser.add_argument("--seed", type=int, default=secrets.randbits(31) or 1)
    parser.add_argument("--only", nargs="+", choices=(SERVICE, *TARGETS), metavar="TARGET")
    parser.add_argument("--codes", action="store_true", help="print how often each method gave which status")
    parser.add_argument("--keep", action="store_true", help="keep inputs of the guided targets that reach further")
    return parser.parse_args()


def _guided(names: list[str], options: argparse.Namespace) -> int:
    """Number of guided targets that failed."""
    if names and not campaign.available():
        print("fuzz: atheris is not there (Linux on x86-64 has it): the guided targets are left out")
        return 0
    outcomes = campaign.fuzz(names, int(options.messages * GUIDED), options.seed, keep=options.keep)
    for each in outcomes:
        reached = f"{each.inputs:9} inputs in {each.seconds:4.0f} s, {each.branches:5} branches"
        print(f"fuzz: {each.name:14}{reached}", flush=True)
    failures = [each for each in outcomes if each.failure]
    for each in failures:
        print(f"\nFAILED {each.name}\n{each.failure}")
    return len(failures)


def _service(options: argparse.Namespace) -> int:
    """Number of kinds of failures of the service."""
    verdicts = Verdicts(int(options.messages * (1 - GUIDED)))
    with tempfile.TemporaryDirectory() as folder, running_service(Path(folder), **SETTINGS) as service:
        rpc = connect(service.address)
        service.metric("nothing")  # The page has connected to the store.
        watch = Watch(service)
        began = time.monotonic()
        uvloop.run(fuzz(service, options.seed, verdicts, watch))
        took = time.monotonic() - began
        for kind, failure in verdicts.failures.items():
            verdicts.failures[kind] = shrunk(rpc.channel, failure)
        check_and_delete(rpc, service.admin, all_runs(rpc), verdicts)
        rpc.channel.close()
        asyncio.run(watch.check(verdicts))
        sent = verdicts.sent.total()
        print(f"fuzz: {sent} messages in {took:.0f} s, {sent / took:.0f} a second: {dict(verdicts.sent)}")
        print(f"fuzz: MiB at the end {rounded(watch.resident())}, grown in the second half {rounded(watch.grown())}")
    for (method, code), count in sorted(verdicts.codes.items()) if options.codes else ():
        print(f"    {method:28} {code:22} {count:9}")
    for failure in verdicts.failures.values():
        print(f"\nFAILED {failure}")
    return len(verdicts.failures)


def all_runs(rpc: Rpc) -> list[str]:
    """List the runs of the clients, and those that messages made under names of their own."""
    return list(rpc.runs.ListRuns(runs_pb2.ListRunsRequest(), timeout=TIMEOUT_S).run_ids)


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 1) for name, value in values.items()}


if __name__ == "__main__":
    sys.exit(main())
