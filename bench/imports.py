"""`make bench-import`: how long the import of the client takes, beside its three dependencies alone.

Fresh interpreters in turn, the page cache warm: one imports grpc, numpy and protobuf, the next the client, which
imports those too. Each tells the time of its import statement by the wall clock and in CPU seconds; the smallest
counts, as other processes can only add to it. The goal: the client in less than 0.3 s, without torch.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_RESULTS = Path(__file__).parent / "results" / "imports.json"
_GOAL_S = 0.3
_MEASURE = """
import sys, time
started, cpu = time.perf_counter(), time.process_time()
{}
print(time.perf_counter() - started, time.process_time() - cpu, int("torch" in sys.modules))
"""
_DEPENDENCIES = "import grpc, numpy, google.protobuf.message, google.protobuf.internal.builder"
_CLIENT = "from trainer_client import BufferClient, Policy, SamplingParams, Task"


@dataclass(frozen=True, slots=True)
class Best:
    """The smallest of several imports, in seconds."""

    wall_s: float
    cpu_s: float


def main() -> int:
    """Measure, print, write bench/results/imports.json; 1 when the goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.imports", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20, help="counted interpreters of each kind (default 20)")
    parser.add_argument("--python", default=sys.executable, help="interpreter to ask (default: this one)")
    parser.add_argument("--out", type=Path, default=_RESULTS, help="default: bench/results/imports.json")
    options = parser.parse_args()
    if options.runs < 1:
        parser.error("--runs must be at least 1")

    dependencies, client = measure(options.python, options.runs)
    met = client.wall_s < _GOAL_S
    own_share = 1 - dependencies.cpu_s / client.cpu_s
    print(f"{'':>26} {'wall s':>8} {'CPU s':>8}   best of {options.runs}")
    for name, best in (("grpc, numpy and protobuf", dependencies), ("with the client", client)):
        print(f"{name:>26} {best.wall_s:>8.3f} {best.cpu_s:>8.3f}")
    print(f"the client's own share of the CPU: {own_share:.0%}")
    print(f"goal: less than {_GOAL_S} s by the wall clock: {'met' if met else 'missed'}")
    report = {
        "client_s": round(client.wall_s, 4),
        "client_cpu_s": round(client.cpu_s, 4),
        "dependencies_s": round(dependencies.wall_s, 4),
        "dependencies_cpu_s": round(dependencies.cpu_s, 4),
        "own_cpu_share": round(own_share, 3),
        "goal_s": _GOAL_S,
        "met": met,
        "runs": options.runs,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written to {options.out}")
    return 0 if met else 1


def measure(python: str, runs: int) -> tuple[Best, Best]:
    """The dependencies alone and the client; the first interpreter of each fills the page cache."""
    for statement in (_DEPENDENCIES, _CLIENT):
        _import(python, statement)
    pairs = [(_import(python, _DEPENDENCIES), _import(python, _CLIENT)) for _ in range(runs)]
    dependencies, client = zip(*pairs, strict=True)
    return _best(dependencies), _best(client)


def _best(times: Sequence[Best]) -> Best:
    return Best(min(each.wall_s for each in times), min(each.cpu_s for each in times))


def _import(python: str, statement: str) -> Best:
    """The statement in a fresh interpreter. Exits where it brings torch."""
    answer = subprocess.run(
        [python, "-c", _MEASURE.format(statement)], capture_output=True, text=True, check=True, timeout=120
    )
    wall_s, cpu_s, torch = answer.stdout.split()
    if int(torch):
        sys.exit(f"`{statement}` imports torch")
    return Best(float(wall_s), float(cpu_s))


if __name__ == "__main__":
    sys.exit(main())
