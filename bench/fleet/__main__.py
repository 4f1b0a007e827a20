"""`make bench-fleet`: thousands of workers at one rpc process, what they cost, and what breaks first.

Service and store run as `rollout-buffer serve` starts them, one rpc process each. The load comes from two processes of
their own, in raw HTTP/2 frames, so that it takes little of the machine; what it takes is reported beside. CPU is user
and system time of the rpc process.

    watches      2,000 at once over 50 connections: refused, opened, idle, told of a publish, memory
    pushes       1,000 push streams of one token, each with a group, all left open
    fleet        10,000 watches, 100 connections of 100, on one replica and on two
    workers      4,000 with two connections each, one for a watch and one for a push stream
    idle engines 200 a second ask for tasks of evaluations, of which there are none, and wait for 10 s
    heartbeats   500 a second: leases of 8 tasks kept and an engine reported, by two calls and by one; and as many as go

A publish names 8 files. `--only` runs the named cases alone, whose results replace the former ones.
"""

import argparse
import json
import os
import platform
from pathlib import Path

from bench.fleet.cases import CASES
from bench.fleet.report import tables
from bench.tables import put

_RESULTS = Path(__file__).parents[1] / "results" / "fleet.json"


def main() -> None:
    """Run the cases, and write down what they cost, here and in the docs."""
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description="Cost of fleets of workers.")
    parser.add_argument("--only", choices=CASES, action="append", help="this case; may be repeated")
    chosen = parser.parse_args().only or list(CASES)
    cases = json.loads(_RESULTS.read_text())["cases"] if _RESULTS.exists() else {}
    for name in chosen:
        cases[name] = {**CASES[name](), **_quiet()}
        print(json.dumps({name: cases[name]}, indent=1), flush=True)
    report = {"machine": platform.machine(), "cores": os.cpu_count(), "cases": cases}
    _RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    if set(CASES) <= set(cases):
        lines = tables(cases)
        print("\n".join(lines))
        put("fleet", lines)


def _quiet() -> dict[str, float]:
    """Processes that wanted a core in the last minute: how much others had the machine."""
    return {"load_average": os.getloadavg()[0]}


if __name__ == "__main__":
    main()
