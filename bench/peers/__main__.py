"""`make bench-peers`: the buffer, both ways, beside Redis Streams by hand and Reverb.

There are three sizes of groups: 18 KB, 147 KB and 1.2 MB. Every side has its turn in every run, and each run begins
with another side. Ratios are made within a run; medians over the runs are reported. A turn measures:

    flow      groups a second and CPU by part, with at most 128 groups pushed and not yet pulled, in batches of 32
    latency   from before a push to the group's arrays having been read, one group at a time
    pull      of 32 groups that are there, acknowledging the batch before

Then flow once more, where an acknowledged write survives loss of power (1.25 MiB groups; Reverb has nothing like it).
About 9 minutes, with --quick about 2; Ctrl-C ends everything that was started.
"""

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.peers import page, report
from bench.peers.groups import DURABLE, SIZES, Size
from bench.peers.runs import FULL, QUICK, Pair, Plan, Turn, run
from bench.peers.sides.kinds import KINDS, REVERB, STREAMS, Kind, default_way, servers

_RESULTS = Path(__file__).parents[1] / "results" / "peers.json"

BUSY = 0.5
"""Load of the machine before a run from which on it is warned of."""


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one short run; nothing is written unless --out says so")
    parser.add_argument("--runs", type=int, help=f"runs of each size (default {FULL.runs}, with --quick {QUICK.runs})")
    parser.add_argument("--size", choices=[size.name for size in SIZES], action="append", help="only this; repeatable")
    parser.add_argument("--side", choices=[kind.name for kind in KINDS], action="append", help="only this; repeatable")
    parser.add_argument("--durability", choices=["memory", "process", "host"], default="memory")
    parser.add_argument("--no-durable-line", action="store_true", help="leave the flow with durability host out")
    parser.add_argument(
        "--reverb",
        type=lambda path: Path(path).absolute(),
        help="Python of an environment with dm-reverb and tensorflow",
    )
    parser.add_argument("--out", type=Path, help="file of the results (default: bench/results/peers.json; see --quick)")
    return parser.parse_args()


class Session:
    """One run of the command: what is measured, and lines of progress."""

    def __init__(self, options: argparse.Namespace) -> None:
        plan = QUICK if options.quick else FULL
        self.plan = replace(plan, runs=options.runs or plan.runs)
        self.left_out = ""
        self._options = options
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line with the seconds since the beginning."""
        print(f"[{time.monotonic() - self._began:5.0f} s] {text}", flush=True)

    def measure(self) -> dict[str, Any]:
        """Measure all; the figures."""
        options, plan, load = self._options, self.plan, os.getloadavg()[0]
        self.say(f"{plan.runs} runs, durability {options.durability}, {os.cpu_count()} cores")
        if load > BUSY:
            self.say(f"the machine is busy (load {load:.1f}): no figure of this run is worth much")
        sizes = [size for size in SIZES if size.name in (options.size or [size.name])]
        with tempfile.TemporaryDirectory(prefix="bench-peers-") as name, ExitStack() as stack:
            scratch = Path(name)
            pairs = self._started(stack, scratch)
            measured = {size: self._run(pairs, scratch, size, options.durability, plan) for size in sizes}
            durable = {}
            if not options.no_durable_line:
                chosen = {kind: pairs[kind] for kind in (default_way(DURABLE), STREAMS) if kind in pairs}
                durable = self._run(chosen, scratch, DURABLE, "host", replace(plan, singles=0))
        return {
            **report.results(measured, durable),
            "runs": plan.runs,
            "durability": options.durability,
            "left_out": self.left_out,
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "load_before": round(load, 1),
            "took_s": round(time.monotonic() - self._began),
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }

    def _started(self, stack: ExitStack, scratch: Path) -> dict[Kind, Pair]:
        """Clients of every side; Reverb's are left out where there are none."""
        kinds = [kind for kind in KINDS if kind.name in (self._options.side or [kind.name])]
        pairs = {}
        for kind in kinds:
            python = self._options.reverb if kind is REVERB else Path(sys.executable)
            if python is not None:
                (folder := scratch / kind.folder).mkdir()
                pairs[kind] = Pair(stack, kind, python, folder)
        for kind in list(pairs):
            try:
                pairs[kind].wait()
            except RuntimeError as error:
                if kind is not REVERB:
                    raise
                del pairs[kind]
                self.left_out = f"Reverb is left out: {error}"
        if REVERB in kinds and self._options.reverb is None:
            self.left_out = "Reverb is left out: no environment with dm-reverb was named (--reverb)"
        if self.left_out:
            self.say(self.left_out)
        return pairs

    def _run(
        self, pairs: dict[Kind, Pair], scratch: Path, size: Size, durability: str, plan: Plan
    ) -> dict[Kind, list[Turn]]:
        (folder := scratch / size.name.replace(" ", "")).mkdir()
        with servers(size, folder, durability, self._options.reverb if REVERB in pairs else None) as up:
            return run(pairs, up, size, plan, self.say)


def main() -> None:
    """Measure, print the table, write the results."""
    options = _options()
    # Also where the shell that started this in the background has had SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = Session(options).measure()
    print("\n".join(["", *report.told(results)]))
    out = options.out or (None if options.quick or options.size or options.side else _RESULTS)
    if out is not None:
        out.write_text(json.dumps(results, indent=2) + "\n")
        written = [out, *(page.write(results) if out == _RESULTS else [])]
        print("\nwritten: " + ", ".join(map(os.path.relpath, written)))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; everything that was started has been ended")
