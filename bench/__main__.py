"""`make bench`: what the buffer costs, as ratios inside one run.

For each group size, the sides run in turn, several times: the buffer with payloads relayed, and with payloads that go
directly between its clients and the store; the floors (raw gRPC bytes in and out, raw
SET + GET + UNLINK); a hand-rolled Redis Streams queue. Every side has the same store settings and malloc settings.
Reported are medians over the runs:

    cpu_over_floors     (service + store CPU) / (gRPC servers' CPU + store and store client's CPU), per byte
    groups_per_s        groups pushed, pulled, committed and freed, by the wall clock
    vs_redis_streams    groups_per_s / those of the hand-rolled queue
"""

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import redis

from bench import floors, ours, redis_streams, workload
from bench.measure import measured, median
from bench.roles import Role

_RESULTS = Path(__file__).parent / "results"
_FREE_TIMEOUT_S = 60.0
WAYS = ("relayed", "direct")


class Sides:
    """All processes of the benchmark, started once."""

    def __init__(self, stack: ExitStack, directory: Path, durability: str) -> None:
        self.service = stack.enter_context(ours.service(directory, durability, *ours.DIRECT))
        self.store = redis.Redis(unix_socket_path=self.service.unix_socket)
        self.store_pid = int(self.store.info("server")["process_id"])
        self.our_clients = {
            way: [stack.enter_context(Role(end, self.service.address, way)) for end in (ours.producer, ours.consumer)]
            for way in WAYS
        }
        self.stream_producer = stack.enter_context(Role(redis_streams.producer, self.service.unix_socket))
        self.stream_consumer = stack.enter_context(Role(redis_streams.consumer, self.service.unix_socket))
        self.raw_server = stack.enter_context(Role(floors.grpc_server))
        self.raw_client = stack.enter_context(Role(floors.grpc_client, self.raw_server.call("port")))
        self.raw_store = stack.enter_context(Role(floors.store_client, self.service.unix_socket))

    def run_ours(self, way: str, number: int, size: workload.Size) -> dict[str, float]:
        """CPU seconds per GB of service and store, and groups a second, with payloads that go this way."""
        producer, consumer = self.our_clients[way]
        run_id = f"bench-{size.name}-{way}-{number}-{os.getpid()}"
        consumer.call("prepare", run_id, size)
        keys = self.store.dbsize()
        service_pids = [pid for pid in self.service.pids if pid != self.store_pid]
        clients = {"producer": [producer.pid], "consumer": [consumer.pid]}
        with measured({"service": service_pids, "store": [self.store_pid], **clients}) as cost:
            start = time.perf_counter()
            consumer.start("consume", run_id, size)
            producer.start("produce", run_id, size)
            producer.wait()
            seen = consumer.wait()
            wall_s = time.perf_counter() - start
            if seen != size.groups:
                raise RuntimeError(f"{seen} groups came out of {size.groups}")
            self._wait_until_freed(keys)
        gigabytes = size.groups * size.group_bytes / 1e9
        return {
            "service": cost.cpu["service"] / gigabytes,
            "store": cost.cpu["store"] / gigabytes,
            "producer": cost.cpu["producer"] / gigabytes,
            "consumer": cost.cpu["consumer"] / gigabytes,
            "groups_per_s": size.groups / wall_s,
        }

    def _wait_until_freed(self, keys: int) -> None:
        """Deleting payloads is part of the cost: wait until the sweeper has done it (a run keeps some index keys)."""
        deadline = time.monotonic() + _FREE_TIMEOUT_S
        while self.store.dbsize() > keys + 32:
            if time.monotonic() > deadline:
                raise RuntimeError("freed payloads are still in the store")
            time.sleep(0.05)

    def run_floors(self, size: workload.Size) -> dict[str, float]:
        """CPU seconds per GB of each floor."""
        message = size.bundle * size.group_bytes
        count = size.groups // size.bundle
        gigabytes = message * count / 1e9
        for role, size_bytes in (
            (self.raw_server, message),
            (self.raw_client, message),
            (self.raw_store, size.group_bytes),
        ):
            role.call("prepare", size_bytes)
        costs = {}
        for name in ("push", "pull"):
            with measured({"server": [self.raw_server.pid]}) as cost:
                self.raw_client.call(name, message, count)
            costs[f"grpc_{name}"] = cost.cpu["server"] / gigabytes
        with measured({"all": [self.store_pid, self.raw_store.pid]}) as cost:
            self.raw_store.call("move", size.group_bytes, size.groups)
        costs["store"] = cost.cpu["all"] / (size.groups * size.group_bytes / 1e9)
        return costs

    def run_streams(self, size: workload.Size, command: str = "produce") -> float:
        """Groups a second of the hand-rolled queue."""
        self.stream_consumer.call("prepare")
        start = time.perf_counter()
        self.stream_consumer.start("consume", size)
        self.stream_producer.call(command, size)
        if self.stream_consumer.wait() != size.groups:
            raise RuntimeError("the Redis Streams queue lost groups")
        return size.groups / (time.perf_counter() - start)


def measure(sides: Sides, size: workload.Size, runs: int) -> dict[str, Any]:
    """One size, its sides in turn; the first pass warms up and does not count."""
    own: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    floor, streams, pipelined = [], [], []
    for i in range(runs + 1):
        print(f"  {size.name}: run {i}/{runs}" if i else f"  {size.name}: warm-up", flush=True)
        a = {way: sides.run_ours(way, i, size) for way in WAYS}
        b = sides.run_floors(size)
        c = sides.run_streams(size)
        d = sides.run_streams(size, "produce_pipelined")
        if i:
            for way in WAYS:
                own[way].append(a[way])
            floor.append(b)
            streams.append(c)
            pipelined.append(d)
    return {
        **{way: _over(its, floor, streams) for way, its in own.items()},
        "redis_streams_groups_per_s": median(streams),
        "redis_streams_pipelined_groups_per_s": median(pipelined),
        "floors_cpu_s_per_gb": {name: median([b[name] for b in floor]) for name in floor[0]},
    }


def _over(
    own: Sequence[dict[str, float]], floor: Sequence[dict[str, float]], streams: Sequence[float]
) -> dict[str, float]:
    """Figures of one way."""
    ratios = [(a["service"] + a["store"]) / sum(b.values()) for a, b in zip(own, floor, strict=True)]
    return {
        "cpu_over_floors": median(ratios),
        "groups_per_s": median([a["groups_per_s"] for a in own]),
        "vs_redis_streams": median([a["groups_per_s"] / c for a, c in zip(own, streams, strict=True)]),
        "service_cpu_s_per_gb": median([a["service"] for a in own]),
        "store_cpu_s_per_gb": median([a["store"] for a in own]),
    }


def main() -> None:
    """Measure, print a table, write bench/results/latest.json."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=7, help="counted runs of each side (default 7)")
    parser.add_argument("--quick", action="store_true", help="3 runs of a quarter of the groups")
    parser.add_argument("--durability", choices=["memory", "process", "host"], default="memory")
    parser.add_argument("--out", type=Path, help="default: bench/results/latest.json; with --quick, none")
    options = parser.parse_args()
    runs = 3 if options.quick else options.runs

    with tempfile.TemporaryDirectory(prefix="rollout-buffer-bench-") as scratch, ExitStack() as stack:
        print(
            f"bench: {runs} runs of each side, durability {options.durability}, on {os.cpu_count()} cores", flush=True
        )
        sides = Sides(stack, Path(scratch), options.durability)
        version = sides.store.info("server")
        results = {size.name: measure(sides, size, runs) for size in workload.sizes(quick=options.quick)}
        engine = f"{version.get('server_name', 'redis')} {version.get('valkey_version', version['redis_version'])}"

    heads = f"{'size':>8} {'way':>8} {'CPU/floors':>11} {'groups/s':>10} {'streams':>10} {'ratio':>7}"
    print(f"\n{heads}   CPU s/GB: service, store | floors")
    for name, ways in results.items():
        lowest = ", ".join(f"{key} {value}" for key, value in ways["floors_cpu_s_per_gb"].items())
        for way in WAYS:
            row = ways[way]
            print(
                f"{name:>8} {way:>8} {row['cpu_over_floors']:>11} {row['groups_per_s']:>10} "
                f"{ways['redis_streams_groups_per_s']:>10} {row['vs_redis_streams']:>7}   "
                f"{row['service_cpu_s_per_gb']}, {row['store_cpu_s_per_gb']} | {lowest}"
            )
    report = {
        "sizes": results,
        "runs": runs,
        "durability": options.durability,
        "malloc": "mallopt: arena_max 1, mmap_threshold 1 GiB, trim_threshold 2 GiB, top_pad 64 MiB, on every side",
        "store": engine,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    out = options.out or (None if options.quick else _RESULTS / "latest.json")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=2) + "\n")
        print(f"\nwritten to {out}")


if __name__ == "__main__":
    main()
