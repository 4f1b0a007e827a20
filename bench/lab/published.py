"""`python -m bench.lab.published`: every published figure beside ours, into docs/staleness.md and a result file.

The figures are in figures.py. Each comparison has its difference and whether that is within its tolerance; the
tolerances are those of tests/lab/test_against_the_page.py.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
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
from rollout_lab.processes import in_processes
from rollout_lab.simulator import SimulationResult, simulate

_RESULTS = Path(__file__).parents[1] / "results" / "staleness_published.json"

TOLERANCES = {
    "closed_form_minus_predicted": 0.15,
    "pqs_minus_predicted": 0.15,
    "iqs_minus_predicted": 0.15,
    "closed_form_minus_measured": 0.25,
    "simulated_minus_measured": 0.25,
    "trained_share": 0.05,
    "trained_max": 0.15,
}
"""Versions; of lengths: of trained over sampled, and of the longest trained response over the published one."""


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


def _run_values(run: Run, result: SimulationResult) -> dict[str, Any]:
    ours = run.closed_form()
    differences = run_differences(run) | {"simulated_minus_measured": result.staleness - run.measured}
    values: dict[str, Any] = {name: getattr(run, name) for name in Run.__slots__}
    values |= {"pqs": ours.pqs, "iqs": ours.iqs, "closed_form": ours.staleness, "simulated": result.staleness}
    values |= {"in_flight": run.in_flight(), "period_ratio": run.period_ratio()}
    if run.step_s is not None:
        values["step_s_over_batch"] = run.step_s / run.batch_rollouts
        values["step_s_over_root_batch"] = noise_adjusted(run.step_s, run.batch_rollouts)
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


def _marked(value: float, name: str, shown: str) -> str:
    """A difference as the docs show it; bold when it is beyond its tolerance."""
    text = shown.format(value).replace("-", "−")
    return f"**{text}**" if beyond({name: value}) else text


def _run_lines(runs: Sequence[dict[str, Any]]) -> Iterator[list[object]]:
    for run in runs:
        differences = run["differences"]
        parts = [
            _marked(differences[name], name, "{:+.2f}") if name in differences else ""
            for name in (
                "closed_form_minus_predicted",
                "pqs_minus_predicted",
                "closed_form_minus_measured",
                "simulated_minus_measured",
            )
        ]
        published = [run[name] if run[name] is not None else "" for name in ("predicted", "predicted_pqs", "measured")]
        setting = [run[name] for name in ("table", "concurrency", "batch_rollouts", "queue_factor", "rho", "tailness")]
        yield [*setting, *published, f"{run['closed_form']:.2f}", *parts, f"{run['in_flight']:.2f}"]


def _bias_lines(rows: Sequence[dict[str, Any]]) -> Iterator[list[object]]:
    for row in rows:
        differences = row["differences"]
        yield [
            f"{row['policy'].replace('_', '-')}, {'q' if row['policy'] == 'queue_drop' else 'η'} {row['factor']}",
            row["tailness"],
            f"{row['trained_share']:.3f}",
            f"{row['our_trained_share']:.3f}",
            _marked(differences["trained_share"], "trained_share", "{:+.3f}"),
            f"{row['trained_max']:,}",
            f"{row['our_trained_max']:,}",
            _marked(differences["trained_max"], "trained_max", "{:+.0%}"),
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
    runs = [_run_values(run, result) for run, result in zip(RUNS, results, strict=False)]
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
    heads = ("table", "C", "B", "q", "ρ", "M", "predicted", "of it PQS", "measured", "ours")
    differences = ("− predicted", "PQS − theirs", "− measured", "simulated − measured", "share of C in flight")
    tables = {
        "published_runs": table((*heads, *differences), list(_run_lines(runs))),
        "published_bias": table(
            ("policy", "tailness", "trained share", "ours", "difference", "longest trained", "ours", "difference"),
            list(_bias_lines(biases)),
        ),
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
