"""`python -m bench.lab.order`: windows of the order of submission, and the longest first. Into results and the docs.

Simulated: mean length trained over generated, tokens wasted, staleness and its tail, period; several seeds. Writes the
tables of the docs, and results/staleness_order.json.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bench.tables import put, table, write_rows
from buffer_cli.staleness.lab import candidate
from buffer_cli.staleness.output import progress, result_values
from buffer_service.domain.policy import Order, RunPolicy
from buffer_service.simulator import Simulation, SimulationResult, Workload, simulate
from buffer_service.simulator.lengths import Lognormal
from rollout_lab.processes import in_processes

_RESULTS = Path(__file__).parents[1] / "results" / "staleness_order.json"

N, GROUP_SIZE = 32, 8
SIGMAS = (0.5, 1.0)
SEEDS = 4
AHEAD = f"areal(4) max_inflight_groups=0 max_queued_groups={5 * N}"
LOSSES = {"by a gate": AHEAD, "by overflow": "queue_drop(1)", "none": f"{AHEAD} max_staleness=none"}
"""Policies by what they lose, and how."""
RHOS = (0.7, 1.4)
WINDOWS = (4 * N, 2 * N, N, 1)
LEASED = (
    "sync",
    "one_step_off",
    f"areal(2) max_inflight_groups=0 max_queued_groups={3 * N} stale_action=wait",
    "streaming(4)",
)
SLOTS = (32, 64, 256)
ERRORS = (0.0, 0.5, 1.0)


@dataclass(frozen=True)
class Case:
    """One row of a table; its setting is what is compared."""

    setting: tuple[str, ...]
    variant: str
    policy: RunPolicy
    workload: Workload


def windows() -> Iterator[Case]:
    """Yield the orders by acceptance, by submission, and within windows where there is room for them."""
    for loss, text in LOSSES.items():
        policy = candidate(text, N).policy
        orders = {"fifo": policy, "submission": replace(policy, order=Order.SUBMISSION)}
        if policy.max_lookahead >= 0:
            orders |= {f"W = {wide}": replace(orders["submission"], order_window_groups=wide) for wide in WINDOWS}
        for sigma in SIGMAS:
            for rho in RHOS:
                workload = Workload(N * GROUP_SIZE, GROUP_SIZE, rho, Lognormal.with_mean(1_400.0, sigma, 13_200))
                for name, ordered in orders.items():
                    yield Case((loss, f"{sigma:g}", f"{rho:g}"), name, ordered, workload)


def longest() -> Iterator[Case]:
    """Yield leases in the order of the tasks, and the longest first by estimates of several errors."""
    for text in LEASED:
        policy = candidate(text, N).policy
        for slots in SLOTS:
            for sigma in SIGMAS:
                plain = Workload(
                    slots, GROUP_SIZE, 1.0, Lognormal.with_mean(1_400.0, sigma, 13_200), submitted_together=N
                )
                setting = (f"`{text}`", f"{slots / (N * GROUP_SIZE):g}", f"{sigma:g}")
                yield Case(setting, "off", policy, plain)
                for error in ERRORS:
                    guessed = replace(plain, estimate_error=error)
                    yield Case(setting, f"{error:g}", replace(policy, longest_first=True), guessed)


def main() -> int:
    """Print and write every setting; 1 when a length is preferred by a hundredth or more though nothing is dropped."""
    parser = argparse.ArgumentParser(prog="python -m bench.lab.order", description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="measured train steps of a simulation (default 300)")
    parser.add_argument("--processes", type=int, help="simulations at once (default: one a core)")
    options = parser.parse_args()
    cases = [*windows(), *longest()]
    steps = options.steps
    asked = [
        Simulation(policy=case.policy, workload=case.workload, steps=steps, warmup=steps // 5, seed=seed)
        for case in cases
        for seed in range(SEEDS)
    ]
    with progress(len(asked), "simulations") as done:
        results = in_processes(simulate, asked, processes=options.processes, done=done)
    by_case = {case: results[SEEDS * index : SEEDS * (index + 1)] for index, case in enumerate(cases)}
    rows = [
        {"setting": " ".join(case.setting), "variant": case.variant} | result_values(result)
        for case, found in by_case.items()
        for result in found
    ]
    of_windows = [(*case.setting, case.variant, *_cells(by_case[case])) for case in windows()]
    put("order_simulated", table(("loss", "σ", "ρ", "order", *_SHOWN), of_windows))
    of_longest = [(*case.setting, case.variant, *_cells(by_case[case])) for case in longest()]
    put("longest_simulated", table(("policy", "C/B", "σ", "error of the estimates", *_SHOWN), of_longest))
    for line in (*of_windows, *of_longest):
        print(*line, sep="  ")
    write_rows(_RESULTS, {"steps": steps, "rows": rows})
    print(f"written to {_RESULTS}")
    lossless = [result for found in by_case.values() for result in found if not result.wasted_token_share]
    return int(any(abs(result.length_bias) >= 0.01 for result in lossless))


_SHOWN = ("length", "wasted", "staleness", "p95", "most", "period")


def _cells(results: list[SimulationResult]) -> tuple[str, ...]:
    biases = [1 + result.length_bias for result in results]
    periods = [result.train_period_ratio for result in results]
    return (
        f"{statistics.mean(biases):.3f} ± {statistics.stdev(biases):.3f}",
        f"{statistics.mean(result.wasted_token_share for result in results):.0%}",
        f"{statistics.mean(result.staleness for result in results):.2f}",
        f"{statistics.mean(result.staleness_p95 for result in results):.1f}",
        f"{max(result.staleness_max for result in results)}",
        f"{statistics.mean(periods):.2f} ± {statistics.stdev(periods):.2f}",
    )


if __name__ == "__main__":
    sys.exit(main())
