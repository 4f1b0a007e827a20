"""Pictures of a run: reward and staleness over training steps, for one seed or several.

Draws on figures of its own, without matplotlib's global state or a display, so that it can be called from any thread.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

_COLOURS = ("#0b6e99", "#d1603d", "#5b8c3a", "#8a5a9e", "#c59a1a", "#4a4a4a")
_INK, _GRID = "#333333", "#dddddd"
_SMOOTHED_STEPS = 9


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Point of a picture: what it shows of one training step."""

    step: int
    reward: float
    """Mean over the step's samples, 0 to 1."""
    staleness_mean: float
    """Mean over the step's groups, in versions."""
    staleness_max: int
    version: int
    """The version that the step's weights were published as."""


def plot_run(records: Sequence[StepRecord], path: Path, *, title: str, eta: int | None = None) -> None:
    """Write `path` (its suffix names the format): reward above, staleness below, steps across.

    `eta`: the run's staleness gate, drawn as a line. Raises ValueError without a record.
    """
    plot_seeds({"": records}, path, title=title, eta=eta)


def plot_seeds(runs: Mapping[str, Sequence[StepRecord]], path: Path, *, title: str, eta: int | None = None) -> None:
    """Draw one curve for each run, by its name ("seed 1").

    Thin: every step; bold: centred mean over 9 steps. Staleness: mean over the groups of a step, and for a
    single run the greatest as a shade. Raises ValueError where a run has no record, or there is no run.
    """
    if not runs or not all(runs.values()):
        raise ValueError("nothing to plot: no run, or a run without a step")
    figure = Figure(figsize=(8.0, 5.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    reward, staleness = figure.subplots(2, 1, sharex=True, height_ratios=(2.4, 1.0))
    for (name, records), colour in zip(runs.items(), _cycle(len(runs)), strict=True):
        steps = np.array([record.step for record in records])
        rewards = np.array([record.reward for record in records])
        reward.plot(steps, rewards, color=colour, linewidth=0.8, alpha=0.35)
        reward.plot(steps, _smooth(rewards), color=colour, linewidth=2.2, label=name or "mean of 9 steps")
        staleness.plot(steps, [r.staleness_mean for r in records], color=colour, linewidth=1.4, label="mean")
        if len(runs) == 1:
            staleness.fill_between(
                steps,
                0,
                [r.staleness_max for r in records],
                step="mid",
                color=colour,
                alpha=0.15,
                linewidth=0,
                label="greatest",
            )
    if eta is not None:
        staleness.axhline(eta, color=_INK, linewidth=1.0, linestyle=(0, (4, 3)), label=f"limit η = {eta}")

    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=_INK, fontweight="bold")
    reward.set_title(_subtitle(runs), loc="left", fontsize=9, color=_INK)
    reward.set_ylabel("exact match")
    reward.set_ylim(0.0, 1.0)
    reward.yaxis.set_major_formatter(PercentFormatter(1.0))
    reward.legend(loc="lower right", frameon=False, fontsize=8)
    staleness.set_ylabel("staleness (versions)")
    staleness.set_xlabel("training step")
    staleness.set_ylim(0.0, max(1.0, _greatest(runs), eta or 0) * 1.15)
    staleness.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    if len(runs) == 1 or eta is not None:
        handles, labels = staleness.get_legend_handles_labels()
        kept = dict(zip(labels, handles, strict=True))
        if len(runs) > 1:
            kept.pop("mean")
        # Above the axes: inside it would hide the limit or a curve.
        staleness.legend(
            kept.values(),
            kept.keys(),
            loc="lower right",
            bbox_to_anchor=(1.0, 0.95),
            frameon=False,
            fontsize=8,
            ncols=3,
        )
    for axes in (reward, staleness):
        _clean(axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _subtitle(runs: Mapping[str, Sequence[StepRecord]]) -> str:
    versions = [len({record.version for record in records}) for records in runs.values()]
    steps = max(len(records) for records in runs.values())
    shown = f"{min(versions)}" if min(versions) == max(versions) else f"{min(versions)} to {max(versions)}"
    each = " in each run" if len(runs) > 1 else ""
    return f"{steps} steps, {shown} weight versions trained and published{each}"


def _greatest(runs: Mapping[str, Sequence[StepRecord]]) -> float:
    """The greatest staleness that will be drawn."""
    if len(runs) == 1:
        return float(max(record.staleness_max for records in runs.values() for record in records))
    return max(record.staleness_mean for records in runs.values() for record in records)


def _smooth(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Centred mean over up to 9 steps; windows shrink at both ends instead of inventing values beyond them."""
    half = _SMOOTHED_STEPS // 2
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def _cycle(n: int) -> list[str]:
    return [_COLOURS[i % len(_COLOURS)] for i in range(n)]


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_INK)
    axes.tick_params(colors=_INK, labelsize=8)
    axes.grid(axis="y", color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(_INK)
        label.set_fontsize(9)
