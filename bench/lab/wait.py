"""`python -m bench.lab.wait`: drop, recycle and wait under one gate. Into results/staleness_wait.json, and the docs.

Simulated, at equal engines: mean length trained over generated, tokens wasted, staleness, period; several seeds.
"""

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.tables import put, table, write_rows
from buffer_cli.staleness.lab import candidate
from buffer_cli.staleness.output import progress, result_values
from buffer_service.domain.policy import StaleAction
from buffer_service.simulator import Simulation, SimulationResult, Workload, simulate
from buffer_service.simulator.lengths import Lognormal
from rollout_lab.processes import in_processes

_RESULTS = Path(__file__).parents[1] / "results" / "staleness_wait.json"

N, GROUP_SIZE, CONCURRENCY = 32, 8, 256
SIGMAS = (0.5, 1.0)
RHOS = (0.67, 1.07, 1.5)
STALENESS = (1, 2, 4, 8)
SEEDS = 4


def simulations(steps: int) -> list[tuple[int, float, float, StaleAction, int, Simulation]]:
    """η, σ, ρ, action and seed, with the simulation."""
    found = []
    for eta in STALENESS:
        policy = candidate(f"areal({eta}) max_inflight_groups=0 max_queued_groups={(eta + 1) * N}", N).policy
        for sigma in SIGMAS:
            lengths = Lognormal.with_mean(1_400.0, sigma, 13_200)
            for rho in RHOS:
                workload = Workload(CONCURRENCY, GROUP_SIZE, rho, lengths)
                for action in StaleAction:
                    acting = replace(policy, stale_action=action)
                    for seed in range(SEEDS):
                        one = Simulation(policy=acting, workload=workload, steps=steps, warmup=steps // 5, seed=seed)
                        found.append((eta, sigma, rho, action, seed, one))
    return found


def main() -> int:
    """Print and write every setting; 1 when waiting prefers a length by a hundredth or more."""
    parser = argparse.ArgumentParser(prog="python -m bench.lab.wait", description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="measured train steps of a simulation (default 400)")
    parser.add_argument("--processes", type=int, help="simulations at once (default: one a core)")
    options = parser.parse_args()
    asked = simulations(options.steps)
    with progress(len(asked), "simulations") as done:
        results = in_processes(simulate, [one for *_, one in asked], processes=options.processes, done=done)
    settings: dict[tuple[int, float, float], dict[StaleAction, list[SimulationResult]]] = {}
    rows: list[dict[str, Any]] = []
    for (eta, sigma, rho, action, seed, _), result in zip(asked, results, strict=True):
        settings.setdefault((eta, sigma, rho), {}).setdefault(action, []).append(result)
        setting = {"max_staleness": eta, "sigma": sigma, "rho": rho, "action": action.value, "seed": seed}
        rows.append(setting | result_values(result))
    # A recycled task gets a new length here, so recycling is as dropping.
    shown = (StaleAction.DROP, StaleAction.WAIT)
    head = ("η, σ, ρ", *(f"{action}: {what}" for action in shown for what in _SHOWN))
    lines = [
        (f"{eta}, {sigma:g}, {rho:g}", *(cell for action in shown for cell in _cells(by_action[action])))
        for (eta, sigma, rho), by_action in settings.items()
    ]
    for line in lines:
        print(*line, sep="  ")
    put("wait_simulated", table(head, lines))
    write_rows(_RESULTS, {"steps": options.steps, "rows": rows})
    print(f"written to {_RESULTS}")
    waiting = [result for by_action in settings.values() for result in by_action[StaleAction.WAIT]]
    return int(any(abs(_length_ratio(result) - 1) >= 0.01 for result in waiting))


_SHOWN = ("length", "wasted", "staleness", "period")


def _cells(results: list[SimulationResult]) -> tuple[str, ...]:
    ratios = [_length_ratio(result) for result in results]
    return (
        f"{statistics.mean(ratios):.3f} ± {statistics.stdev(ratios):.3f}",
        f"{statistics.mean(result.wasted_token_share for result in results):.0%}",
        f"{statistics.mean(result.staleness for result in results):.2f}",
        f"{statistics.mean(result.train_period_ratio for result in results):.2f}",
    )


def _length_ratio(result: SimulationResult) -> float:
    return result.trained_mean_length / result.sampled_mean_length


if __name__ == "__main__":
    sys.exit(main())
