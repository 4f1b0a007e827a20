"""`python -m bench.lab.published`: every published figure beside ours, into docs/staleness.md and a result file.

The figures are in figures.py. Each comparison has its difference and whether that is within its tolerance; the
tolerances are those of tests/lab/test_against_the_page.py.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.lab.figures import (
    BIAS_CONCURRENCY,
    BIAS_GROUPS_PER_BATCH,
    BIAS_RHO,
    BIASES,
    FITTED,
    GROUP_SIZE,
    RUNS,
    SIGMAS,
    Bias,
    Run,
)
from bench.tables import put, table
from buffer_service.observability.estimate.closed_forms import noise_adjusted
from buffer_service.simulator import SimulationResult, simulate
from rollout_lab.processes import in_processes

_RESULTS = Path(__file__).parents[1] / "results" / "staleness_published.json"

TOLERANCES = {
    "closed_form_minus_predicted": 0.15,
    "pqs_minus_predicted": 0.15,
    "iqs_minus_predicted": 0.15,
    "closed_form_minus_measured": 0.25,
    "simulated_minus_measured": 0.25,
    "step_s": 0.05,
    "trained_share": 0.05,
    "trained_max": 0.15,
}
"""Versions; of step times: over the published one; of lengths: of trained over sampled, and of the longest trained
response over the published one.
"""


def run_differences(run: Run) -> dict[str, float]:
    """Our closed form minus every published figure of a run."""
    ours = run.closed_form()
    differences = {"closed_form_minus_measured": ours.staleness - run.measured}
    if run.predicted is not None:
        differences["closed_form_minus_predicted"] = ours.staleness - run.predicted
    if run.predicted_pqs is not None and run.predicted_iqs is not None:
        differences["pqs_minus_predicted"] = ours.pqs - run.predicted_pqs
        differences["iqs_minus_predicted"] = ours.iqs - run.predicted_iqs
    return differences


def bias_differences(bias: Bias, result: SimulationResult) -> dict[str, float]:
    """Our simulation against a row of length bias: the share trained, and the longest trained response over theirs."""
    return {
        "trained_share": 1 + result.length_bias - bias.share,
        "trained_max": result.trained_max_length / bias.trained_max - 1,
    }


def beyond(differences: dict[str, float]) -> list[str]:
    """Names of the differences that are larger than their tolerance."""
    return [name for name, value in differences.items() if abs(value) > TOLERANCES[name]]


def _relative_step(run: Run, result: SimulationResult) -> float:
    """Our step time with the trainer's time for a response as the unit."""
    return run.batch_rollouts * max(1.0, 1.0 / run.rho) * result.train_period_ratio


def response_seconds(runs: Sequence[tuple[Run, SimulationResult]]) -> dict[str, float]:
    """The trainer's seconds for a response in each table of step times, the one number that is fitted to it."""
    shares: dict[str, list[float]] = {}
    for run, result in runs:
        if run.step_s is not None:
            shares.setdefault(run.table, []).append(run.step_s / _relative_step(run, result))
    return {name: statistics.mean(of_table) for name, of_table in shares.items()}


def _run_values(run: Run, result: SimulationResult, seconds: Mapping[str, float]) -> dict[str, Any]:
    ours = run.closed_form()
    differences = run_differences(run) | {"simulated_minus_measured": result.staleness - run.measured}
    values: dict[str, Any] = {name: getattr(run, name) for name in Run.__slots__}
    values |= {"pqs": ours.pqs, "iqs": ours.iqs, "closed_form": ours.staleness, "simulated": result.staleness}
    values |= {"in_flight": run.in_flight(), "period_ratio": run.period_ratio()}
    if run.step_s is not None:
        values["our_step_s"] = seconds[run.table] * _relative_step(run, result)
        differences["step_s"] = values["our_step_s"] / run.step_s - 1
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in values.items()}
    return rounded | {
        "differences": {name: round(value, 3) for name, value in differences.items()},
        "beyond_tolerance": beyond(differences),
    }


def _bias_values(bias: Bias, result: SimulationResult) -> dict[str, Any]:
    differences = bias_differences(bias, result)
    return {
        **{name: getattr(bias, name) for name in Bias.__slots__},
        "trained_share": round(bias.share, 4),
        "our_sampled_mean": round(result.sampled_mean_length, 1),
        "our_trained_mean": round(result.trained_mean_length, 1),
        "our_trained_share": round(1 + result.length_bias, 4),
        "our_sampled_max": result.sampled_max_length,
        "our_trained_max": result.trained_max_length,
        "differences": {name: round(value, 4) for name, value in differences.items()},
        "beyond_tolerance": beyond(differences),
    }


def _beside(figures: Sequence[float], form: str, *, bold: bool = False) -> str:
    """A published figure and ours as the docs show them, or nothing; bold when further apart than the tolerance."""
    text = " / ".join(format(figure, form) for figure in figures)
    return f"**{text}**" if bold else text


_RUN_HEAD = (
    *("table", "C", "B", "q", "ρ", "M", "PQS", "IQS", "predicted", "measured / closed form", "measured / simulated"),
    *("step s", "over B", "over √B", "share of C in flight"),
)


def _run_line(run: Mapping[str, Any]) -> list[object]:
    def beside(theirs: str, ours: str, difference: str) -> str:
        figures = [] if run[theirs] is None else [run[theirs], run[ours]]
        return _beside(figures, ".2f", bold=difference in run["beyond_tolerance"])

    batch, steps = run["batch_rollouts"], [run["step_s"], run.get("our_step_s")] if run["step_s"] else []
    return [
        *(run[name] for name in ("table", "concurrency", "batch_rollouts", "queue_factor", "rho", "tailness")),
        beside("predicted_pqs", "pqs", "pqs_minus_predicted"),
        beside("predicted_iqs", "iqs", "iqs_minus_predicted"),
        beside("predicted", "closed_form", "closed_form_minus_predicted"),
        beside("measured", "closed_form", "closed_form_minus_measured"),
        beside("measured", "simulated", "simulated_minus_measured"),
        _beside(steps, ".1f", bold="step_s" in run["beyond_tolerance"]),
        _beside([step_s / batch for step_s in steps], ".2f"),
        _beside([noise_adjusted(step_s, batch) for step_s in steps], ".1f"),
        f"{run['in_flight']:.2f}",
    ]


_BIAS_HEAD = (
    "policy",
    "tailness",
    "sampled mean",
    "trained mean",
    "trained share",
    "sampled longest",
    "trained longest",
)


def _bias_line(row: Mapping[str, Any]) -> list[object]:
    def beside(name: str, form: str) -> str:
        return _beside([row[name], row[f"our_{name}"]], form, bold=name in row["beyond_tolerance"])

    return [
        f"{row['policy'].replace('_', '-')}, {'q' if row['policy'] == 'queue_drop' else 'η'} {row['factor']}",
        row["tailness"],
        beside("sampled_mean", ",.0f"),
        beside("trained_mean", ",.0f"),
        beside("trained_share", ".3f"),
        beside("sampled_max", ",d"),
        beside("trained_max", ",d"),
    ]


def main() -> int:
    """Print and write every row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600, help="measured train steps of a row")
    parser.add_argument("--processes", type=int, default=None, help="default: one per core")
    parser.add_argument("--out", type=Path, default=_RESULTS)
    given = parser.parse_args()
    simulations = [run.simulation(given.steps) for run in RUNS] + [bias.simulation(given.steps) for bias in BIASES]
    results = in_processes(simulate, simulations, processes=given.processes)
    simulated = list(zip(RUNS, results, strict=False))
    seconds = response_seconds(simulated)
    runs = [_run_values(run, result, seconds) for run, result in simulated]
    biases = [_bias_values(bias, result) for bias, result in zip(BIASES, results[len(RUNS) :], strict=True)]
    stated = [run for run in RUNS if "rho" not in run.assumed]
    shares = [run.in_flight() for run in stated]
    mean = statistics.mean(shares)
    errors = [abs(run.closed_form(mean).staleness - run.measured) for run in stated]
    report = {
        "steps": given.steps,
        "tolerances": TOLERANCES,
        "in_flight": {
            "least": round(min(shares), 3),
            "mean": round(mean, 3),
            "most": round(max(shares), 3),
            "largest_difference_with_mean": round(max(errors), 3),
        },
        "train_s_of_a_response": {name: round(value, 4) for name, value in seconds.items()},
        "runs": runs,
        "bias_setting": {
            "group_size": GROUP_SIZE,
            "groups_per_batch": BIAS_GROUPS_PER_BATCH,
            "concurrency": BIAS_CONCURRENCY,
            "rho": BIAS_RHO,
            "sigma_by_tailness": SIGMAS,
            "cap_by_tailness": {tailness: lengths.cap for tailness, lengths in FITTED.items()},
            "mean_by_tailness": {tailness: round(lengths.mean, 1) for tailness, lengths in FITTED.items()},
        },
        "bias": biases,
    }
    given.out.parent.mkdir(exist_ok=True)
    given.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    tables = {
        "published_runs": table(_RUN_HEAD, [_run_line(run) for run in runs]),
        "published_bias": table(_BIAS_HEAD, [_bias_line(row) for row in biases]),
    }
    for name, lines in tables.items():
        print("\n".join(lines))
        if given.out == _RESULTS:
            put(name, lines)
    print(f"share of C in flight: {report['in_flight']}")
    rows = [*runs, *biases]
    print(f"{sum(bool(row['beyond_tolerance']) for row in rows)} of {len(rows)} rows are beyond a tolerance")
    return 0


if __name__ == "__main__":
    sys.exit(main())
