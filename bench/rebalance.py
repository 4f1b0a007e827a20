"""`python -m bench.rebalance`: a second replica beside one that has workers gets its share of their connections.

A part of `make bench-fleet`. Replicas are services as `rollout-buffer serve` starts them, on one store. The balancer
before them picks one at random for each connection, as kube-proxy does. Workers are the real client, watcher and pusher
of a worker, 200 in one process. Each watches the weights, waits for leases that do not come, and pushes a small group
every two seconds; a trainer publishes every second. Reported is when the second replica, which comes after all of them,
has 40 to 60 % of the open connections. So is what it has after 60 s, and every error that a worker met, the repeated
ones too. The exit status is 1 where the share is not even, a worker had trouble, or a group was lost or accepted twice.
"""

import argparse
import asyncio
import json
import logging
import os
import platform
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

import structlog

from bench import workload
from bench.balancer import Balancer
from bench.ours import service
from buffer_wire import layout
from rollout_workers.counters import Counters
from rollout_workers.service.client import ServiceClient, WaitLog
from rollout_workers.service.pusher import Pusher
from rollout_workers.versions import BASE
from rollout_workers.weights.watcher import WeightWatcher
from trainer_client import BufferClient
from trainer_client.policy import Policy

RUN = "fleet"
_RESULTS = Path(__file__).parent / "results" / "rebalance.json"
_GROUP = workload.Size("2kb", 2_000, 1, 1)
_PAYLOAD = layout.payload_pieces(workload.arrays(_GROUP))
_LEASE_WAIT_S = 5.0
_UP_TIMEOUT_S = 60.0
LEAST, MOST = 0.4, 0.6
"""Bounds of a share that counts as even."""


@dataclass(slots=True)
class Account:
    """Account of what all workers of a fleet met."""

    repeats: list[str] = field(default_factory=list)
    """Errors that were waited out: a call or stream was repeated, and the worker saw nothing of it."""
    outcomes: Counters = field(default_factory=Counters)
    pushed: int = 0
    """Groups that were answered."""


class _Noted(WaitLog):
    """Notes every wait instead of saying some."""

    def __init__(self, what: str, repeats: list[str]) -> None:
        super().__init__(what)
        self._said = f"{what}: "
        self._repeats = repeats

    def say(self, waiting_on: str, why: str) -> None:
        self._repeats.append(f"{self._said}{why}, on {waiting_on}")


class _Client(ServiceClient):
    """Calls of a worker, whose repeats are noted."""

    repeats: list[str]

    def wait_log(self, what: str) -> WaitLog:
        return _Noted(what, self.repeats)


class Fleet:
    """Workers in a thread of this process. Open as a context; `stop` raises what ended a worker before."""

    def __init__(self, address: str, run_id: str, workers: int, *, push_every_s: float) -> None:
        self.account = Account()
        self._address, self._run_id, self._every_s = address, run_id, push_every_s
        self._watchers: list[WeightWatcher] = []
        self._failed: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._work(workers)), name="fleet")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Have every push answered, and end."""
        self._stop.set()
        self._thread.join()
        if self._failed is not None:
            raise self._failed

    def know(self, version: int) -> int:
        """Workers that have heard of this version."""
        return sum(each.latest is not None and each.latest.version.version >= version for each in self._watchers)

    async def _work(self, workers: int) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(workers):
                    tasks.create_task(self._worker(number))
        except BaseException as failed:  # noqa: BLE001 - raised again in the thread that closes the fleet
            self._failed = failed

    async def _worker(self, number: int) -> None:
        client = _Client(self._address, self._run_id, instance_id=f"i{number}", timeout_s=60.0)
        client.repeats = self.account.repeats
        watcher, pusher = WeightWatcher(client), Pusher(client, self.account.outcomes)
        self._watchers.append(watcher)
        async with asyncio.TaskGroup() as tasks:
            endless = [tasks.create_task(run) for run in (watcher.run(), pusher.run(), self._ask(client, number))]
            pushes = 0
            while not self._stop.is_set():
                await pusher.push(workload.header(_GROUP, f"w{number}-{pushes}", 0), _PAYLOAD)
                pushes += 1
                self.account.pushed += 1
                await asyncio.sleep(self._every_s * random.uniform(0.5, 1.5))
            for task in endless:
                task.cancel()
        await client.close()

    async def _ask(self, client: ServiceClient, number: int) -> None:
        for request in range(1 << 30):
            await client.lease(f"e{number}", f"r{request}", BASE, max_tasks=1, wait_s=_LEASE_WAIT_S)


class Publisher:
    """Publishes a version every `every_s` in a thread of its own, until the context closes."""

    def __init__(self, client: BufferClient, run_id: str, every_s: float) -> None:
        self.version = 0
        self._client, self._run_id, self._every_s = client, run_id, every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="publisher")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        term = self._client.resume(self._run_id, next_step=0).term
        while not self._stop.wait(self._every_s):
            self._client.publish(self._run_id, term=term, version=self.version + 1)
            self.version += 1


@dataclass(slots=True)
class Report:
    """Report of one trial."""

    workers: int
    age_s: float
    even_after_s: float | None
    """Seconds from the second replica's coming until it had an even share; None: it never had."""
    share: float
    """Its share of the open connections at the end."""
    connections: dict[str, int]
    """Open connections at the end, by the replica's number."""
    groups: int
    accepted: int
    duplicates: int
    repeats: list[str]
    heard_all: bool
    """True when every worker had heard of the last published version at the end."""

    @property
    def met(self) -> bool:
        """True when the share is even, and workers had no trouble and lost nothing."""
        whole = self.groups == self.accepted and not self.duplicates and not self.repeats
        return self.even_after_s is not None and LEAST <= self.share <= MOST and whole and self.heard_all


def rebalanced(directory: Path, *, workers: int, age_s: float, watch_s: float) -> Report:
    """Have a second replica come beside one with workers, and watch for `watch_s` how connections spread."""
    flags = ("--rpc-processes", "1", "--connection-age-s", str(age_s), "--max-streams", "4096")
    for each in ("first", "second"):
        (directory / each).mkdir()
    with (
        service(directory / "first", "memory", *flags) as first,
        Balancer([first.address]) as balancer,
        BufferClient(balancer.address) as client,
    ):
        client.create_run(RUN, Policy(batch_groups=1_000, max_queued_groups=1_000_000))
        publisher = Publisher(client, RUN, 1.0)
        with publisher, Fleet(balancer.address, RUN, workers, push_every_s=2.0) as fleet:
            _until(lambda: fleet.know(1) == workers and fleet.account.pushed >= workers)
            with service(directory / "second", "memory", *flags, "--store", f"unix://{first.unix_socket}") as second:
                balancer.backends.append(second.address)
                began = time.monotonic()
                even_after_s = even_after(balancer, second.address, watch_s)
                time.sleep(max(0.0, began + watch_s - time.monotonic()))
                connections = {"first": balancer.open[first.address], "second": balancer.open[second.address]}
                last = publisher.version
                with suppress(TimeoutError):
                    _until(lambda: fleet.know(last) == workers)
                heard_all = fleet.know(last) == workers
                # While both replicas serve.
                fleet.stop()
                accepted = client.run(RUN).ledger.groups.accepted.groups
    outcomes = fleet.account.outcomes.pushed
    return Report(
        workers=workers,
        age_s=age_s,
        even_after_s=even_after_s,
        share=round(connections["second"] / sum(connections.values()), 3),
        connections=connections,
        groups=fleet.account.pushed,
        accepted=accepted,
        duplicates=outcomes["duplicate"],
        repeats=fleet.account.repeats,
        heard_all=heard_all,
    )


def even_after(balancer: Balancer, address: str, within_s: float) -> float | None:
    """Seconds until this replica has an even share of the open connections; None: not within `within_s`."""
    began = time.monotonic()
    while (passed_s := time.monotonic() - began) < within_s:
        if LEAST <= balancer.open[address] / max(1, balancer.open.total()) <= MOST:
            return round(passed_s, 1)
        time.sleep(0.1)
    return None


def _until(met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _UP_TIMEOUT_S
    while not met():
        if time.monotonic() > deadline:
            raise TimeoutError("the fleet does not come up")
        time.sleep(0.05)


def main() -> None:
    """Measure, print, write bench/results/rebalance.json."""
    parser = argparse.ArgumentParser(prog="python -m bench.rebalance", description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--age-s", type=float, default=20.0, help="--connection-age-s of the replicas (default 20)")
    parser.add_argument("--watch-s", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=_RESULTS)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with tempfile.TemporaryDirectory(prefix="rollout-buffer-rebalance-") as scratch:
        report = rebalanced(Path(scratch), workers=options.workers, age_s=options.age_s, watch_s=options.watch_s)
    told = asdict(report)
    print(json.dumps(told, indent=2))
    facts = {
        "met": report.met,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    options.out.write_text(json.dumps({**told, **facts}, indent=2) + "\n")
    sys.exit(not report.met)


if __name__ == "__main__":
    main()
