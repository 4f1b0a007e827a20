"""`make bench-sites`: groups and weights between two sites, 100 ms apart, with losses, beside none of both.

The way is real TCP of the kernel between two network namespaces; a program between them delays and drops packets
(link.py). Every way has the same program and the same 100 Mbit/s, so its own cost is in all columns. Each value is the
median of the runs. Every group that was pushed came out once, and the ledgers balance, or the command fails; the
weights are compared with their SHA-256 by those who fetch them.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from bench import ours, workload
from bench.roles import Role
from bench.sites import roles
from bench.sites.world import NEAR, Way, World, world
from bench.tables import put, table
from trainer_client.publish import FilesPublisher

_RESULTS = Path(__file__).parents[1] / "results" / "sites.json"
_FILE_BYTES = 16_000_000
_WORKERS = 4
_GROUPS = {"20kb": 256, "147kb": 48}
_BATCH = 16
WAYS = (
    Way("near", 0.0, 0.0),
    Way("100 ms", 100.0, 0.0),
    Way("100 ms, 1 %", 100.0, 0.01),
    Way("100 ms, 1 %, BBR", 100.0, 0.01, congestion="bbr"),
)
ROWS = {
    "one": "weights, 1 worker, 1 connection: MB/s",
    "several": "weights, 1 worker, as many connections as it takes: MB/s",
    "apart": "weights, 4 workers, from the publisher: MB/s in all",
    "relayed": "weights, 4 workers, through a relay: MB/s in all",
    "push 20kb": "pushes of 20 KB from afar: groups/s",
    "push 147kb": "pushes of 147 KB from afar: groups/s",
    "pull 147kb": "pulls of 147 KB from afar: groups/s",
}


class Sites:
    """All processes, started once."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        self.world: World = stack.enter_context(world())
        self.world.lay(WAYS[0])
        (folder / "service").mkdir()
        service = stack.enter_context(ours.service(folder / "service", "memory", "--listen", f"{NEAR}:0", "--insecure"))
        self._address = service.address
        self._producer = stack.enter_context(Role(ours.producer, service.address, "relayed"))
        self._consumer = stack.enter_context(Role(ours.consumer, service.address, "relayed"))
        self._workers = stack.enter_context(Role(roles.far_workers, self.world.far))
        stack.callback(self._workers.call, "stop")
        publisher = stack.enter_context(FilesPublisher(folder / "published", serve="http", host=NEAR))
        content = os.urandom(_FILE_BYTES)
        manifest = publisher.write(lambda into: (into / "model.safetensors").write_bytes(content), term=1, version=1)
        self._manifest = manifest.listing().SerializeToString()
        self._upstream = manifest.base_url.rpartition("/")[0]

    def measure(self, row: str) -> float:
        """Value of a row of the table, over the way that lies now."""
        self._number += 1
        if row.startswith(("push", "pull")):
            return self._groups(*row.split())
        into, workers = self._folder / f"weights-{self._number}", 1 if row in ("one", "several") else _WORKERS
        mirrors = [self._workers.call("relay", into / "relay", self._upstream)] if row == "relayed" else []
        streams = 1 if row == "one" else 16
        seconds: float = self._workers.call("fetch", into, self._manifest, workers, mirrors, streams)
        shutil.rmtree(into)
        return workers * _FILE_BYTES / 1e6 / seconds

    def _groups(self, way: str, name: str) -> float:
        size = workload.Size(name, int(name[:-2]) * 1000, _GROUPS[name], _BATCH)
        run_id = f"sites-{self._number}"
        self._consumer.call("prepare", run_id, size)
        # Started anew: gRPC's windows, and TCP's, on a connection from before would be those of another way.
        build = roles.far_producer if way == "push" else roles.far_consumer
        with Role(build, self.world.far, self._address) as far:
            if way == "push":
                began = time.perf_counter()
                self._consumer.start("consume", run_id, size)
                far.call("produce", run_id, size)
                seen = self._consumer.wait()
            else:
                self._producer.call("produce", run_id, size)
                began = time.perf_counter()
                seen = far.call("consume", run_id, size)
            taken = time.perf_counter() - began
        if seen != size.groups:
            raise RuntimeError(f"{seen} groups came out of {size.groups}")
        return size.groups / taken


def main() -> None:
    """Measure, print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="runs of each cell (default 3)")
    parser.add_argument("--quick", action="store_true", help="one run, nothing written")
    options = parser.parse_args()
    runs = 1 if options.quick else options.runs
    measured: dict[str, dict[str, list[float]]] = {way.name: {row: [] for row in ROWS} for way in WAYS}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        sites = Sites(stack, Path(folder))
        for number in range(runs):
            for way in WAYS:
                sites.world.lay(way)
                for row, text in ROWS.items():
                    value = sites.measure(row)
                    measured[way.name][row].append(value)
                    print(f"run {number + 1}, {way.name}: {text} {value:.2f}", flush=True)
    found = {way: {row: statistics.median(values) for row, values in rows.items()} for way, rows in measured.items()}
    lines = table(
        ["", *found], [[text, *(f"{rows[row]:.3g}" for rows in found.values())] for row, text in ROWS.items()]
    )
    print("\n".join(lines))
    if not options.quick:
        date = time.strftime("%Y-%m-%d")
        _RESULTS.write_text(json.dumps({"date": date, "runs": runs, "measured": measured}, indent=1) + "\n")
        page = put("sites", [*lines, "", f"{date}: medians of {runs} runs on {os.cpu_count()} cores."])
        print(f"written into {page}")


if __name__ == "__main__":
    main()
