"""`make bench-import`: how long the import of the client takes, beside its dependencies alone.

Fresh interpreters in turn, the page cache warm: one imports grpc and protobuf; one what a trainer's first lines import,
which brings those; one also what is imported later, by the first session and the first batch, numpy included; one the
dependencies of that. Each tells the time of its statement by the wall clock and in CPU seconds; the smallest counts, as
other processes can only add to it. The goal: the first lines in less than 0.3 s, without torch.
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
_DEPENDENCIES = "import grpc, google.protobuf.message, google.protobuf.internal.builder"
_CLIENT = "from trainer_client import BufferClient, Policy, SamplingParams, Task"
_STATEMENTS = {
    "dependencies": _DEPENDENCIES,
    "client": _CLIENT,
    "loop_dependencies": f"{_DEPENDENCIES}, numpy",
    "loop": f"{_CLIENT}; import trainer_client.session.opening, trainer_client.client.assembly",
}
_NAMES = {
    "dependencies": "grpc and protobuf",
    "client": "with the client",
    "loop_dependencies": "grpc, protobuf and numpy",
    "loop": "with session and batches",
}


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

    best = measure(options.python, options.runs)
    met = best["client"].wall_s < _GOAL_S
    print(f"{'':>26} {'wall s':>8} {'CPU s':>8}   best of {options.runs}")
    for kind, one in best.items():
        print(f"{_NAMES[kind]:>26} {one.wall_s:>8.3f} {one.cpu_s:>8.3f}")
    own_share = 1 - best["dependencies"].cpu_s / best["client"].cpu_s
    print(f"the client's own share of the CPU: {own_share:.0%}")
    print(f"goal: less than {_GOAL_S} s by the wall clock: {'met' if met else 'missed'}")
    report = {
        **{f"{kind}_s": round(one.wall_s, 4) for kind, one in best.items()},
        **{f"{kind}_cpu_s": round(one.cpu_s, 4) for kind, one in best.items()},
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


def measure(python: str, runs: int) -> dict[str, Best]:
    """Each statement's best; its first interpreter fills the page cache and does not count."""
    times: dict[str, list[Best]] = {kind: [] for kind in _STATEMENTS}
    for _ in range(runs + 1):
        for kind, statement in _STATEMENTS.items():
            times[kind].append(_import(python, statement))
    return {kind: _best(all_times[1:]) for kind, all_times in times.items()}


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
