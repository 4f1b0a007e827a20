"""`python -m bench.lab.policies`: queue policies beside each other, in eight settings. Into results/staleness_lab.json.

Once at equal throughput: each has as many engines as it needs for the pace of queue_drop. The question is whether one
is fresher than queue-drop and streaming without length bias. `floor` is pre-queue staleness by the closed form, about
what no queue can take away without preferring short groups. And once on the same engines, with several seeds: the
frontier of staleness, throughput and bias, which is drawn into docs/images/staleness_frontier.png.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from bench.tables import put, table, write_rows
from buffer_cli.staleness.lab import candidate, trial_values
from buffer_cli.staleness.output import progress
from buffer_cli.staleness.plot import plot_frontiers
from buffer_service.observability.estimate.closed_forms import pre_queue
from buffer_service.simulator import Workload
from buffer_service.simulator.lengths import Lognormal
from rollout_lab.comparison import Comparison, Trial, compare, tried
from rollout_lab.frontier import Point, beaten_by, point
from rollout_lab.processes import in_processes

_RESULTS = Path(__file__).parents[1] / "results" / "staleness_lab.json"
_IMAGE = Path(__file__).parents[2] / "docs" / "images" / "staleness_frontier.png"

GROUPS_PER_BATCH, GROUP_SIZE, CONCURRENCY = 32, 8, 256
RHOS = (0.67, 0.85, 1.07, 1.5)
SIGMAS = (0.5, 1.0)
LENGTH_MEAN, LENGTH_CAP = 1_400.0, 13_200
LAG = 1 / 32
"""Time from a publish to its load, over the ideal period."""
SEEDS = 3
SHOWN = ((0.67, 0.5), (1.07, 0.5), (1.5, 0.5), (1.07, 1.0))
"""Settings in the docs: ρ, σ."""

POLICIES = (
    "queue_drop",
    "queue_drop fresh_start_ms=0",
    "queue_drop(2)",
    "queue_drop(2) order=lifo",
    "queue_drop(2) order=stalest_first",
    "queue_drop(4) order=lifo",
    "queue_drop order=submission",
    "queue_drop(4) reserve_queue_space=true",
    "queue_drop(4) reserve_queue_space=true order=submission order_window_groups=32",
    "queue_drop(4) reserve_queue_space=true order=submission order_window_groups=64",
    "queue_drop target_staleness_milli=1500",
    "queue_max(1)",
    "queue_max(2)",
    "queue_max(4)",
    "queue_max(4) stale_action=recycle",
    "queue_max(4) staleness_measure=tail",
    "sync",
    "sync longest_first=true",
    "sync surplus=2",
    "one_step_off",
    "one_step_off longest_first=true",
    "one_step_off fresh_start_ms=0",
    "one_step_off stale_action=wait",
    "miles",
    "areal(4)",
    "areal(1) max_inflight_groups=0",
    "areal(2) max_inflight_groups=0",
    "areal(2) max_inflight_groups=0 stale_action=wait",
    "areal(2) max_inflight_groups=0 stale_action=wait longest_first=true",
    "areal(4) max_inflight_groups=0",
    "areal(4) max_inflight_groups=0 stale_action=wait",
    "areal(4) max_inflight_groups=0 order=submission order_window_groups=32",
    "streaming(8)",
    "streaming(4)",
    "streaming(4) longest_first=true",
    "streaming(4) surplus=2",
    "streaming(4) target_staleness_milli=500",
    "streaming(4) target_staleness_milli=1000",
    "streaming(4) target_staleness_milli=1500",
    "streaming(4) fresh_start_ms=0",
    "streaming(2)",
    "streaming(1)",
    "streaming(4) order=lifo",
    "streaming(4) order=stalest_first",
    "streaming(4) max_queued_groups=32 order=lifo",
    "streaming(4) max_queued_groups=96 reserve_queue_space=true order=submission order_window_groups=64",
    "streaming(1) max_queued_groups=8",
    "streaming(1) max_queued_groups=8 order=lifo",
    "streaming(1) max_queued_groups=8 order=lifo target_staleness_milli=1000",
    "streaming(4) max_staleness=4",
)
"""The first one sets the pace."""

Setting = tuple[float, float]
Row = dict[str, Any]


def comparison(setting: Setting, policies: Iterable[str], steps: int, seed: int = 0) -> Comparison:
    """The policies in a setting."""
    rho, sigma = setting
    lengths = Lognormal.with_mean(LENGTH_MEAN, sigma, LENGTH_CAP)
    period = Workload(CONCURRENCY, GROUP_SIZE, rho, lengths).ideal_period(GROUPS_PER_BATCH, 0)
    workload = Workload(CONCURRENCY, GROUP_SIZE, rho, lengths, publish_lag=LAG * period)
    candidates = [candidate(written, GROUPS_PER_BATCH) for written in policies]
    return Comparison(candidates=candidates, workload=workload, steps=steps, seed=seed)


def at_one_pace(setting: Setting, policies: Sequence[str], steps: int, processes: int | None) -> list[Row]:
    """Rows of these policies at the throughput of the first of all."""
    asked = comparison(setting, dict.fromkeys((*POLICIES[:2], *policies)), steps)
    with progress(len(asked.candidates), f"at one pace, {_name(setting)}") as done:
        trials = compare(asked, processes=processes, done=done)
    tailness = asked.workload.lengths.tailness(GROUP_SIZE)
    ratio = CONCURRENCY / (GROUPS_PER_BATCH * GROUP_SIZE)
    said = {"tailness": tailness, "floor": pre_queue(ratio, setting[0], tailness)}
    return [said | trial_values(trial) for trial in trials if trial.name in policies]


def on_the_same_engines(setting: Setting, policies: Sequence[str], steps: int, processes: int | None) -> list[Row]:
    """Rows of these policies, several seeds each."""
    asked = [
        partial(tried, comparison(setting, [], steps, seed), candidate(written, GROUPS_PER_BATCH), 1.0)
        for written in policies
        for seed in range(SEEDS)
    ]
    with progress(len(asked), f"on the same engines, {_name(setting)}") as done:
        trials = in_processes(_called, asked, processes=processes, done=done)
    return [asdict(point(trials[at : at + SEEDS])) for at in range(0, len(trials), SEEDS)]


def _called(trial: "partial[Trial]") -> Trial:
    return trial()


_PARTS = {"frontier": ("name", on_the_same_engines), "rows": ("policy", at_one_pace)}
"""Lists of the results: what names the policy in a row, and what makes the rows."""


def measured(known: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Rows of every policy in every setting: those known, of as many steps, and those begun within the minutes."""
    until = time.monotonic() + 60 * options.minutes
    settings = [(rho, sigma) for sigma in SIGMAS for rho in RHOS]
    found: dict[str, Any] = {"steps": options.steps}
    missed = 0
    for part, (named, measure) in _PARTS.items():
        of_setting: dict[Setting, dict[str, Row]] = {setting: {} for setting in settings}
        for row in known.get(part, []) if known.get("steps") == options.steps else []:
            of_setting.get((row["rho"], row["sigma"]), {})[row[named]] = row
        for setting, rows in of_setting.items():
            missing = [written for written in POLICIES if written not in rows]
            if missing and time.monotonic() < until:
                said = {"rho": setting[0], "sigma": setting[1]}
                rows |= {row[named]: said | row for row in measure(setting, missing, options.steps, options.processes)}
            missed += sum(written not in rows for written in POLICIES)
        found[part] = [rows[one] for rows in of_setting.values() for one in POLICIES if one in rows]
    print(f"{missed} rows are missing" if missed else "all rows are there")
    return found


# ── what the docs show ───────────────────────────────────────────────────────


def pace_lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Staleness of each policy at one pace."""
    cells = {(row["policy"], row["rho"], row["sigma"]): _pace_cell(row) for row in rows}
    lines = [(f"`{one}`", *(cells.get((one, *setting), "") for setting in SHOWN)) for one in POLICIES]
    return [line for line in lines if any(line[1:])]


def _pace_cell(row: Row) -> str:
    said = (
        [f"{row['length_bias']:+.0%}".replace("%", " %").replace("-", "−")] if abs(row["length_bias"]) >= 0.005 else []
    )
    said += [f"× {row['engines']:.2f}"] if row["engines"] > 1.005 else []
    note = ", ".join(said) if row["keeps_pace"] else "too slow"
    return f"{row['staleness']:.2f}" + (f" ({note})" if note else "")


def frontiers(rows: Sequence[Row]) -> dict[Setting, list[Point]]:
    """Points of the settings that have all policies."""
    found: dict[Setting, list[Point]] = {}
    for row in rows:
        values: dict[str, Any] = {**row, "spread": tuple(row["spread"])}
        setting = (values.pop("rho"), values.pop("sigma"))
        found.setdefault(setting, []).append(Point(**values))
    return {setting: points for setting, points in found.items() if len(points) == len(POLICIES)}


def frontier_lines(found: dict[Setting, list[Point]]) -> list[tuple[object, ...]]:
    """Each policy in the shown settings, in how many of all it is beaten, and by whom most often."""
    lines: list[tuple[object, ...]] = []
    for number, written in enumerate(POLICIES):
        cells = [_point_cell(found[one][number], found[one]) for one in SHOWN if one in found]
        beating = [beaten_by(points[number], points) for points in found.values()]
        counts: dict[str, int] = {}
        for better in beating:
            for other in better:
                counts[other.name] = counts.get(other.name, 0) + 1
        by = max(counts, key=lambda name: counts[name], default="")
        beaten = sum(map(bool, beating))
        kept = sum(
            any(other.oldest <= points[number].oldest for other in better)
            for better, points in zip(beating, found.values(), strict=True)
        )
        lines.append(
            (f"{number + 1} `{written}`", *cells, f"{beaten}", f"{kept}", f"`{by}` ({counts[by]})" if by else "")
        )
    return lines


def _point_cell(one: Point, others: Sequence[Point]) -> str:
    bias = f", {one.bias:+.0%}".replace("%", " %").replace("-", "−") if abs(one.bias) >= 0.005 else ""
    text = f"{one.staleness:.2f}, {one.throughput:.2f}{bias}"
    return text if beaten_by(one, others) else f"**{text}**"


def _name(setting: Setting) -> str:
    return f"ρ {setting[0]:g}, σ {setting[1]:g}"


def main() -> int:
    """Measure what is missing, write all of it."""
    parser = argparse.ArgumentParser(prog="python -m bench.lab.policies", description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="measured train steps of a simulation (default 400)")
    parser.add_argument("--processes", type=int, help="simulations at once (default: one a core)")
    parser.add_argument(
        "--minutes", type=float, default=inf, help="begin no setting after so many; a later call goes on"
    )
    parser.add_argument("--anew", action="store_true", help="measure what is known as well")
    options = parser.parse_args()
    known = json.loads(_RESULTS.read_text()) if _RESULTS.exists() and not options.anew else {}
    found = measured(known, options)
    write_rows(_RESULTS, found)
    shown = [_name(setting) for setting in SHOWN]
    put("lab_pace", table(("policy", *shown), pace_lines(found["rows"])))
    points = frontiers(found["frontier"])
    if all(setting in points for setting in SHOWN):
        head = ("policy", *shown, f"beaten in, of {len(points)}", "by one with no older group", "mostly by")
        lines = frontier_lines(points)
        print(*("  ".join(map(str, line)) for line in lines), sep="\n")
        put("lab_frontier", table(head, lines))
        plot_frontiers({_name(setting): points[setting] for setting in SHOWN}, _IMAGE)
    print(f"written to {_RESULTS} and {_IMAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
