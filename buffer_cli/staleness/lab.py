"""`rollout-buffer lab`: policies beside each other, as a table or as JSON."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from buffer_cli.output import print_json
from buffer_cli.staleness.commands import StepOptions, WorkloadOptions
from buffer_cli.staleness.inputs import policy_of, workload_of
from buffer_cli.staleness.output import naming_options, progress, result_values
from buffer_cli.staleness.plot import plot_trials
from buffer_service.simulator.lengths import Lengths
from buffer_wire.errors import InvalidField
from rollout_lab.comparison import MOST_ENGINES, Candidate, Comparison, Trial, compare

WORKLOAD: Mapping[str, Callable[[str], float]] = {"surplus": int, "estimate_error": float}
"""Fields of the workload that a candidate may set, for they are a worker's or a caller's choice."""


@naming_options
def run(
    workload: WorkloadOptions,
    simulation: StepOptions,
    policies: Sequence[str] | None,
    *,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Compare as the options say."""
    written = policies or selection(workload.groups_per_batch)
    comparison = Comparison(
        candidates=[candidate(one, workload.groups_per_batch) for one in written],
        workload=workload_of(workload),
        **asdict(simulation),
    )
    with progress(len(written), "policies") as done:
        trials = compare(comparison, done=done)
    if plot:
        plot_trials(trials, f"ρ {workload.rho:g}", plot)
    if as_json:
        print_json({"rho": workload.rho, "policies": [trial_values(trial) for trial in trials]})
    else:
        _print(trials, comparison, comparison.workload.lengths)


def selection(groups_per_batch: int) -> list[str]:
    """Candidates where nobody names any."""
    micro = max(1, groups_per_batch // 8)
    return [
        "queue_drop",
        "queue_drop(2)",
        "queue_drop(2) order=lifo",
        "queue_max(1)",
        "queue_max(2)",
        "queue_max(4)",
        "areal(2)",
        f"streaming({micro})",
        f"streaming({micro}) order=lifo",
    ]


def candidate(written: str, groups_per_batch: int) -> Candidate:
    """A policy as --policy takes it: a preset, then field=value by spaces. Raises InvalidField, InvalidPolicy.

    A field may also be one of WORKLOAD.
    """
    name, *assignments = written.split() or [""]
    fields: list[str] = []
    workload: dict[str, float] = {}
    for word in assignments:
        field, separator, value = word.partition("=")
        if not separator:
            raise InvalidField("policy", written, "a preset, then field=value by spaces")
        if field in WORKLOAD:
            workload[field] = _number(field, value)
        else:
            fields.append(word)
    return Candidate(written, policy_of(name, groups_per_batch, fields), workload)


def _number(field: str, value: str) -> float:
    try:
        return WORKLOAD[field](value)
    except ValueError as error:
        raise InvalidField(field, value, "a number") from error


def trial_values(trial: Trial) -> dict[str, Any]:
    """A trial as JSON values."""
    return {
        "policy": trial.name,
        "engines": trial.engines,
        "keeps_pace": trial.keeps_pace,
        "period": trial.period,
        **result_values(trial.result),
    }


def _print(trials: Sequence[Trial], comparison: Comparison, lengths: Lengths) -> None:
    workload = comparison.workload
    console = Console(highlight=False)
    title = f"ρ {workload.rho:g}, C {workload.concurrency}, mean response {lengths.mean:.0f} tokens"
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("policy")
    for heading in ("mean", "p95", "max", "tokens", "bias", "wasted", "idle", "period", "engines"):
        table.add_column(heading, justify="right", no_wrap=True)
    for trial in trials:
        result = trial.result
        table.add_row(
            trial.name,
            f"{result.staleness:.2f}",
            str(result.staleness_p95),
            str(result.staleness_max),
            f"{result.token_staleness:.2f}",
            f"{result.length_bias:+.1%}",
            f"{result.wasted_token_share:.0%}",
            f"{result.trainer_idle_share:.0%} {result.slot_idle_share:.0%}",
            f"{trial.period:.2f}",
            f"{trial.engines:.2f}" if trial.keeps_pace else "too slow",
        )
    console.print(table)
    console.print(
        "mean, p95, max: staleness of groups, in versions; tokens: mean of tokens. bias: trained over sampled mean "
        "length. idle: share of the time that the trainer is, and slots are. period: over what the trainer alone needs "
        "for a step. engines: over those given, as many as it takes "
        f"to keep the pace of {trials[0].name}; too slow: {MOST_ENGINES:g} times as many do not, and the figures are "
        f"for those given. {comparison.steps} train steps; {comparison.warmup} before were not counted."
    )
