"""`make bench-cluster`: what a group costs the service and its stores, with payloads beside the index and on a cluster.

Both ways of the payloads, 20 KB and 1.2 MB. The index is a server on TCP in both cases, the cluster has three shards
without replicas, all on loopback. Each figure is the median of the runs, in which the two have their turns: CPU of the
rpc process, and of all servers of the store, in µs a group. On one machine a cluster is not faster; its cost counts.
"""

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import ours, workload
from bench.measure import measured, median
from bench.roles import Role
from tests.support.sentinels import free_port
from tests.support.store_cluster import store_cluster
from tests.support.store_server import store_server

WAYS = ("relayed", "direct")


@dataclass(frozen=True, slots=True)
class Side:
    """A service whose payloads lie in one place: its rpc process, its stores, and a producer and a consumer by way."""

    name: str
    rpc: tuple[int, ...]
    stores: tuple[int, ...]
    ends: dict[str, tuple[Role, Role]]

    def move(self, size: workload.Size, way: str, run_id: str) -> tuple[float, float]:
        """Move all groups of a size; µs of CPU a group of the service and of the stores."""
        producer, consumer = self.ends[way]
        consumer.call("prepare", run_id, size)
        with measured({"service": self.rpc, "stores": self.stores}) as cost:
            producer.start("produce", run_id, size)
            consumer.call("consume", run_id, size)
            producer.wait()
        return cost.cpu["service"] / size.groups * 1e6, cost.cpu["stores"] / size.groups * 1e6


@contextmanager
def sides(folder: Path) -> Iterator[list[Side]]:
    """The two services."""
    with ExitStack() as stack:
        made = []
        cluster = stack.enter_context(store_cluster(replicas=0))
        for name in ("beside", "cluster"):
            port = free_port()
            index = stack.enter_context(store_server("--port", str(port)))
            pids = [server.process.pid for server in (index,) if server.process is not None]
            flags = ["--rpc-processes", "1", "--store", f"redis://127.0.0.1:{port}/0", "--recent-bytes", "0"]
            if name == "cluster":
                flags += ["--payload-store", cluster.url]
                pids += [node.process.pid for node in cluster.nodes if node.process is not None]
            own = folder / name
            own.mkdir()
            running = stack.enter_context(ours.service(own, "memory", *flags, *ours.DIRECT))
            ends = {
                way: (
                    stack.enter_context(Role(ours.producer, running.address, way)),
                    stack.enter_context(Role(ours.consumer, running.address, way)),
                )
                for way in WAYS
            }
            made.append(Side(name, running.pids[1:], tuple(pids), ends))
        yield made


def main() -> None:
    """Print a table; `--check` fails above the bounds of the service's CPU: 1.5 times at 20 KB, 1.15 at 1.2 MB."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    small, *_ = workload.sizes(quick=True)
    # CPU is counted in ticks of 10 ms: of a quarter of the large groups some figures would have but a few.
    *_, large = workload.sizes(quick=False)
    bounds = {small.name: 1.5, large.name: 1.15}
    found: defaultdict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, sides(Path(folder)) as both:
        for run in range(given.runs):
            for size in (small, large):
                for way in WAYS:
                    for side in both:
                        found[size.name, way, side.name].append(side.move(size, way, f"{size.name}-{way}-{run}"))
    print("| group | way | service, beside | on a cluster | | stores, beside | on a cluster | |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    above = []
    for size in (small, large):
        for way in WAYS:
            beside, cluster = (
                [median(values) for values in zip(*found[size.name, way, name], strict=True)]
                for name in ("beside", "cluster")
            )
            ratios = [on / by for by, on in zip(beside, cluster, strict=True)]
            cells = [
                f"{by:,.0f} µs | {on:,.0f} µs | {ratio:.2f} ×"
                for by, on, ratio in zip(beside, cluster, ratios, strict=True)
            ]
            print(f"| {size.name} | {way} | {' | '.join(cells)} |")
            if way == "relayed" and ratios[0] > bounds[size.name]:
                above.append(f"{size.name}: {ratios[0]:.2f}")
    if given.check and above:
        raise SystemExit(f"the service's CPU is above its bounds: {', '.join(above)}")


if __name__ == "__main__":
    main()
