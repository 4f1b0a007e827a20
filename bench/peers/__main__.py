"""`make bench-peers`: the buffer, both ways, beside Redis Streams by hand and Reverb.

There are three sizes of groups: 18 KB, 147 KB and 1.2 MB. Every side has its turn in every run, and each run begins
with another side. Ratios are made within a run; medians over the runs are reported. A turn measures:

    flow      groups a second and CPU by part, with at most 128 groups pushed and not yet pulled, in batches of 32
    latency   from before a push to the group's arrays having been read, one group at a time
    pull      of 32 groups that are there, acknowledging the batch before

Then flow once more, where an acknowledged write survives loss of power (1.25 MiB groups; Reverb has nothing like it).
About 9 minutes, with --quick about 1; Ctrl-C ends everything that was started.
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

from bench.peers import report
from bench.peers.groups import DURABLE, SIZES
from bench.peers.runs import FULL, QUICK, Pair, run
from bench.peers.sides.kinds import KINDS, REVERB, STREAMS, default_way, servers

_RESULTS = Path(__file__).parents[1] / "results" / "peers.json"


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


def main() -> None:
    """Measure, print the table, write the results."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.monotonic()
    plan = QUICK if options.quick else FULL
    plan = replace(plan, runs=options.runs or plan.runs)
    sizes = [size for size in SIZES if size.name in (options.size or [size.name])]
    kinds = [kind for kind in KINDS if kind.name in (options.side or [kind.name])]
    left_out = ""
    if REVERB in kinds and options.reverb is None:
        kinds.remove(REVERB)
        left_out = "Reverb is left out: no environment with dm-reverb was named (--reverb)"

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {text}", flush=True)

    with tempfile.TemporaryDirectory(prefix="bench-peers-") as name, ExitStack() as stack:
        scratch = Path(name)
        say(f"{plan.runs} runs, {len(kinds)} sides, durability {options.durability}, {os.cpu_count()} cores")
        if left_out:
            say(left_out)
        pairs = {}
        for kind in kinds:
            (folder := scratch / kind.folder).mkdir()
            python = options.reverb if kind is REVERB else Path(sys.executable)
            pairs[kind] = Pair(stack, kind, python, folder)
        for pair in pairs.values():
            pair.wait()
        measured = {}
        for size in sizes:
            (folder := scratch / size.name.replace(" ", "")).mkdir()
            with servers(size, folder, options.durability, options.reverb if REVERB in kinds else None) as up:
                measured[size] = run(pairs, up, size, plan, say)
        durable = {}
        if not options.no_durable_line:
            (folder := scratch / "durable").mkdir()
            chosen = {kind: pairs[kind] for kind in (default_way(DURABLE), STREAMS) if kind in pairs}
            with servers(DURABLE, folder, "host", None) as up:
                durable = run(chosen, up, DURABLE, replace(plan, singles=0), say)
    facts = {
        "runs": plan.runs,
        "durability": options.durability,
        "left_out": left_out,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "took_s": round(time.monotonic() - began),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    results = {**report.results(measured, durable), **facts}
    print("\n".join(["", *report.told(results)]))
    out = options.out or (None if options.quick or options.size or options.side else _RESULTS)
    if out is not None:
        out.write_text(json.dumps(results, indent=2) + "\n")
        print(f"\nwritten to {out}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; everything that was started has been ended")
