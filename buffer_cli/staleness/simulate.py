"""`rollout-buffer simulate`: one simulation, as a table or as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from buffer_cli.output import print_json
from buffer_cli.staleness.commands import QueueOptions, StepOptions, WorkloadOptions
from buffer_cli.staleness.inputs import policy_of, workload_of
from buffer_cli.staleness.output import figures, naming_options, result_values
from buffer_cli.staleness.plot import plot_simulation
from buffer_service.control.decision import decide
from buffer_service.simulator import Simulation, SimulationResult
from buffer_service.simulator import simulate as simulated


@naming_options
def run(
    workload: WorkloadOptions,
    queue: QueueOptions,
    simulation: StepOptions,
    policy: str,
    assignments: Sequence[str] | None,
    *,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Simulate as the options say."""
    result = simulated(
        Simulation(
            policy=policy_of(policy, workload.groups_per_batch, assignments, **asdict(queue)),
            workload=workload_of(workload),
            controller=decide,
            **asdict(simulation),
        )
    )
    if plot:
        plot_simulation(result, policy, plot)
    if as_json:
        print_json({"policy": policy, "rho": workload.rho, **result_values(result)})
    else:
        _print(result, f"{policy}, ρ {workload.rho:g}")


def _print(result: SimulationResult, title: str) -> None:
    console = Console(highlight=False)
    table = Table("", "", title=title, show_header=False)
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
