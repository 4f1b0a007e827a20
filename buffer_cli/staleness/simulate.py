"""`rollout-buffer simulate`: one simulation, as a table or as JSON."""

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from buffer_cli.exits import exit_code
from buffer_cli.staleness.inputs import policy_of, workload_of
from buffer_cli.staleness.output import as_options, figures, result_values
from buffer_cli.staleness.plot import plot_simulation
from rollout_lab.simulator import Simulation, SimulationResult
from rollout_lab.simulator import simulate as simulated


def run(given: dict[str, Any]) -> int:
    """Simulate as the options say; returns the exit code."""
    return exit_code(lambda: as_options(lambda: _simulate(given)))


def _simulate(given: dict[str, Any]) -> int:
    simulation = Simulation(
        policy=policy_of(
            given["policy"],
            given["groups_per_batch"],
            given["assignments"],
            queue_factor=given["queue_factor"],
            max_staleness=given["max_staleness"],
            micro_batch=given["micro_batch"],
        ),
        workload=workload_of(given),
        steps=given["steps"],
        warmup=given["warmup"],
        seed=given["seed"],
    )
    result = simulated(simulation)
    if given["plot"]:
        plot_simulation(result, given["policy"], given["plot"])
    if given["as_json"]:
        print(json.dumps({"policy": given["policy"], "rho": given["rho"], **result_values(result)}, indent=2))
    else:
        _print(result, given)
    return 0


def _print(result: SimulationResult, given: dict[str, Any]) -> None:
    console = Console(highlight=False)
    table = Table("", "", title=f"{given['policy']}, ρ {given['rho']:g}", show_header=False)
    pqs, iqs, total, tokens = figures(result.pqs, result.iqs, result.staleness, result.token_staleness)
    table.add_row("staleness by head", f"{total} = {pqs} pre-queue + {iqs} in-queue")
    table.add_row("95th percentile, largest", f"{result.staleness_p95}, {result.staleness_max}")
    table.add_row("staleness of tokens", tokens)
    table.add_row("tailness M", f"{result.tailness:.3g}")
    table.add_row("train period / ideal", f"{result.train_period_ratio:.3f}")
    table.add_row("trainer idle, slots idle", f"{result.trainer_idle_share:.0%}, {result.slot_idle_share:.0%}")
    lengths = f"{result.trained_mean_length:.0f} trained of {result.sampled_mean_length:.0f} sampled"
    table.add_row("mean length", f"{lengths} ({result.length_bias:+.1%})")
    table.add_row("longest", f"{result.trained_max_length} trained of {result.sampled_max_length} sampled")
    table.add_row("groups", f"{result.dropped_groups} dropped, {result.recycled_groups} recycled")
    table.add_row("wasted tokens", f"{result.wasted_token_share:.1%}")
    console.print(table)
    console.print(
        f"{result.steps} train steps; {result.warmup} steps of warm-up before were not counted; seed {result.seed}"
    )
