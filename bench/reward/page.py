"""Table and figure of the page, from the results that are there."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.reward.cells import LOSSES, POLICIES, SYNCHRONOUS, Results, Row
from bench.reward.curves import (
    Curve,
    Values,
    against_synchronous,
    by_step,
    by_time,
    curves,
    settled,
    shared_s,
)
from bench.tables import DOCS, put, table

FIGURE = DOCS / "images" / "reward.png"
_COLOURS = ("#222222", "#8a8a8a", "#f0b429", "#e07b39", "#b02a30", "#0b6e99", "#5b8c3a", "#8a5a9e")
_TIMES = 200
"""Points of a curve over time."""


def write(results: Results) -> list[Path]:
    """Write the figure, and the table into its page; the files that were written."""
    rows = results.rows()
    if not rows:
        return []
    picture(rows, FIGURE)
    page = put("reward", lines(rows))
    return [FIGURE, *([page] if page else [])]


def lines(rows: Sequence[Row]) -> list[str]:
    """The table: the synchronous run's reward, and what each policy has more or less, after equal steps and times."""
    last = np.asarray([_steps(rows)], dtype=float)
    limit_s = math.floor(shared_s(rows))
    ends: tuple[tuple[str, Callable[[Row], Values]], ...] = (
        (f"{last[0]:.0f} steps", lambda row: by_step(row, last)),
        (f"{limit_s} s", lambda row: by_time(row, np.asarray([float(limit_s)]))),
    )
    cells = {(loss, end): _entries(rows, loss, at) for loss in LOSSES for end, at in ends}
    columns = [(loss, end) for end, _ in ends for loss in LOSSES]
    body = []
    for policy in POLICIES:
        own = [row for row in rows if row["policy"] == policy]
        if not own:
            continue
        body.append(
            (
                policy,
                _range([sum(row["loss"] == loss for row in own) for loss in LOSSES]),
                f"{settled(own, 'staleness'):.2f}, {max(row['staleness_max'] for row in own)}",
                f"{settled(own, 'log_ratio'):.3f}",
                f"{fmean(row['at_s'][-1] / _steps(rows) for row in own):.2f}",
                f"{fmean(sum(row['cpu_s'].values()) for row in own):.0f}",
                *(cells[column].get(policy, "") for column in columns),
            )
        )
    head = (
        "policy",
        "seeds",
        "staleness: mean, max",
        "log ratio",
        "s a step",
        "CPU s",
        *(f"{loss}, {end}" for loss, end in columns),
    )
    return table(head, body)


def picture(rows: Sequence[Row], path: Path) -> None:
    """Draw the curves with their intervals: a column for each loss, by steps above, by the wall clock below."""
    figure = Figure(figsize=(13.0, 6.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    steps, seconds = np.arange(_steps(rows) + 1.0), np.linspace(0.0, shared_s(rows), _TIMES)
    grid = figure.subplots(2, len(LOSSES), sharey=True, squeeze=False)
    for column, loss in enumerate(LOSSES):
        of_loss = [row for row in rows if row["loss"] == loss]
        _draw(grid[0][column], steps, curves(_values(of_loss, lambda row: by_step(row, steps))))
        _draw(grid[1][column], seconds, curves(_values(of_loss, lambda row: by_time(row, seconds))))
        grid[0][column].set_title(loss, fontsize=10)
        grid[0][column].set_xlabel("training steps", fontsize=8)
        grid[1][column].set_xlabel("seconds of the wall clock", fontsize=8)
    for axes in grid[:, 0]:
        axes.set_ylabel("expected exact match", fontsize=8)
    drawn = {label: line for axes in grid.flat for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(
        drawn.values(), drawn.keys(), loc="outside lower center", ncols=len(POLICIES), frameon=False, fontsize=8
    )
    figure.savefig(path)


def _draw(axes: Axes, x: Values, found: dict[str, Curve]) -> None:
    for policy, colour in zip(POLICIES, _COLOURS, strict=False):
        if policy in found:
            curve = found[policy]
            axes.plot(x, curve.mean, color=colour, linewidth=1.5, label=policy)
            if not np.isnan(curve.half).any():
                axes.fill_between(x, curve.mean - curve.half, curve.mean + curve.half, color=colour, alpha=0.12, lw=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)


def _entries(rows: Sequence[Row], loss: str, at: Callable[[Row], Values]) -> dict[str, str]:
    values = _values([row for row in rows if row["loss"] == loss], at)
    found = {policy: _shown(curve, "+.3f") for policy, curve in curves(against_synchronous(values)).items()}
    if SYNCHRONOUS in values:
        found[SYNCHRONOUS] = _shown(curves(values)[SYNCHRONOUS], ".3f")
    return found


def _values(rows: Sequence[Row], at: Callable[[Row], Values]) -> dict[str, dict[int, Values]]:
    """Values of rows of one loss, by policy and seed."""
    found: dict[str, dict[int, Values]] = {}
    for row in rows:
        found.setdefault(row["policy"], {})[row["seed"]] = at(row)
    return found


def _shown(curve: Curve, form: str) -> str:
    half = "" if math.isnan(curve.half[0]) else f" ± {curve.half[0]:.3f}"
    return f"{format(curve.mean[0], form)}{half}".replace("-", "−")


def _steps(rows: Sequence[Row]) -> int:
    return len(rows[0]["staleness"])


def _range(counts: Sequence[int]) -> str:
    return f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
