"""`python -m bench.lab.surplus`: groups that begin G + x samples. Into results/staleness_surplus.json, and the docs.

Simulated, several seeds: mean length trained over that of all samples that began, tokens cut off, staleness, period. A
slot that becomes free takes the next sample, which is what room counted in samples does.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from bench.tables import put, table, write_rows
from buffer_cli.staleness.lab import candidate
from buffer_cli.staleness.output import progress, result_values
from buffer_service.simulator import Simulation, SimulationResult, Workload, simulate
from buffer_service.simulator.lengths import Lognormal
from rollout_lab.processes import in_processes

_RESULTS = Path(__file__).parents[1] / "results" / "staleness_surplus.json"

N, GROUP_SIZE, CONCURRENCY = 32, 8, 256
POLICIES = ("sync", "queue_drop(1)", "streaming(4)")
SIGMAS = (0.5, 1.0)
RHOS = (0.7, 1.4)
SURPLUS = (0, 1, 2, 4)
SEEDS = 4
UNBIASED = 0.01
"""Largest share by which a mean length may be off without surplus."""

Setting = tuple[str, float, float, int]
"""Policy, σ, ρ and surplus samples."""


def simulations(steps: int) -> list[tuple[Setting, int, Simulation]]:
    """Setting and seed, with the simulation."""
    found = []
    for name in POLICIES:
        policy = candidate(name, N).policy
        for sigma in SIGMAS:
            lengths = Lognormal.with_mean(1_400.0, sigma, 13_200)
            for rho in RHOS:
                for surplus in SURPLUS:
                    workload = Workload(CONCURRENCY, GROUP_SIZE, rho, lengths, surplus=surplus)
                    for seed in range(SEEDS):
                        one = Simulation(policy=policy, workload=workload, steps=steps, warmup=steps // 5, seed=seed)
                        found.append(((name, sigma, rho, surplus), seed, one))
    return found


def main() -> int:
    """Print and write every setting; 1 when a length is preferred without surplus, or none is with it."""
    parser = argparse.ArgumentParser(prog="python -m bench.lab.surplus", description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="measured train steps of a simulation (default 200)")
    parser.add_argument("--processes", type=int, help="simulations at once (default: one a core)")
    options = parser.parse_args()
    asked = simulations(options.steps)
    with progress(len(asked), "simulations") as done:
        results = in_processes(simulate, [one for *_, one in asked], processes=options.processes, done=done)
    settings: dict[Setting, list[SimulationResult]] = {}
    rows: list[dict[str, Any]] = []
    for (setting, seed, _), result in zip(asked, results, strict=True):
        settings.setdefault(setting, []).append(result)
        policy, sigma, rho, surplus = setting
        rows.append(
            {"policy": policy, "sigma": sigma, "rho": rho, "surplus": surplus, "seed": seed} | result_values(result)
        )
    lines = [
        (f"`{policy}`", f"{sigma:g}", f"{rho:g}", str(surplus), *_cells(of, settings[policy, sigma, rho, 0]))
        for (policy, sigma, rho, surplus), of in settings.items()
    ]
    for line in lines:
        print(*line, sep="  ")
    put("surplus_simulated", table(_HEAD, lines))
    write_rows(_RESULTS, {"steps": options.steps, "rows": rows})
    print(f"written to {_RESULTS}")
    biased = {setting: abs(result.length_bias) >= UNBIASED for setting, of in settings.items() for result in of}
    return int(any(is_biased != (setting[3] > 0) for setting, is_biased in biased.items()))


_HEAD = (
    "policy",
    "σ",
    "ρ",
    "surplus",
    "length trained over begun",
    "tokens cut off",
    "wasted in all",
    "staleness",
    "period",
)


def _cells(results: list[SimulationResult], without: list[SimulationResult]) -> tuple[str, ...]:
    """Means over seeds; the period beside that of the same seed without surplus."""
    ratios = [1 + result.length_bias for result in results]
    periods = [one.train_period_ratio / other.train_period_ratio for one, other in zip(results, without, strict=True)]
    return (
        f"{statistics.mean(ratios):.3f} ± {statistics.stdev(ratios):.3f}",
        f"{statistics.mean(result.surplus_token_share for result in results):.0%}",
        f"{statistics.mean(result.wasted_token_share for result in results):.0%}",
        f"{statistics.mean(result.staleness for result in results):.2f}",
        f"× {statistics.mean(periods):.2f} ± {statistics.stdev(periods):.2f}",
    )


if __name__ == "__main__":
    sys.exit(main())
