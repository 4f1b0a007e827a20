"""`python -m bench.lab.speed`: CPU seconds of 10,000 simulated steps, into results/staleness_speed.json."""

import argparse
import json
import sys
import time
from pathlib import Path

from bench.measure import median
from buffer_service.simulator import Simulation, Workload, simulate
from buffer_service.simulator.lengths import Lognormal
from rollout_lab.queue_policies import queue_policy

_RESULTS = Path(__file__).parents[1] / "results" / "staleness_speed.json"
_LENGTHS = Lognormal.with_mean(1_400, 0.5)

CASES: dict[str, tuple[str, int, int, float, dict[str, int]]] = {
    "queue_drop, C 128, B 128, q 1, ρ 0.67": ("queue_drop", 16, 128, 0.67, {"queue_factor": 1}),
    "queue_drop, C 128, B 128, q 1, ρ 1.14": ("queue_drop", 16, 128, 1.14, {"queue_factor": 1}),
    "queue_drop, C 128, B 128, q 2, ρ 1.50": ("queue_drop", 16, 128, 1.5, {"queue_factor": 2}),
    "queue_max 2, C 128, B 128, ρ 1.14": ("queue_max", 16, 128, 1.14, {"max_staleness": 2}),
    "streaming 4, C 256, B 256, ρ 1.07": ("streaming", 32, 256, 1.07, {"micro_batch": 4}),
}
"""Sizes of the published runs, and of the streaming table; G = 8."""


def main() -> int:
    """Measure every case several times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=_RESULTS)
    given = parser.parse_args()
    report: dict[str, dict[str, float]] = {}
    for name, (policy, groups, concurrency, rho, words) in CASES.items():
        workload = Workload(concurrency, 8, rho, _LENGTHS)
        simulation = Simulation(
            policy=queue_policy(policy, groups, **words), workload=workload, steps=given.steps, warmup=0
        )
        report[name] = {"cpu_s": median([_cpu_s(simulation) for _ in range(given.repeats)])}
        print(f"{name}: {report[name]['cpu_s']:.2f} s")
    given.out.parent.mkdir(exist_ok=True)
    given.out.write_text(json.dumps({"steps": given.steps, "cases": report}, indent=1, ensure_ascii=False) + "\n")
    return 0


def _cpu_s(simulation: Simulation) -> float:
    start = time.process_time()
    simulate(simulation)
    return time.process_time() - start


if __name__ == "__main__":
    sys.exit(main())
