"""Pictures of plans and simulations. They need matplotlib, and neither a display nor its global state."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, cast

from buffer_service.observability.estimate.closed_forms import ROUGH_ABOVE, ROUGH_BELOW
from buffer_service.simulator import SimulationResult
from buffer_wire.errors import InvalidField
from rollout_lab import planner
from rollout_lab.comparison import Trial
from rollout_lab.frontier import Point, beaten_by
from rollout_lab.planner import Choice, Setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

_BLUE, _RED, _GREY = "#0b6e99", "#d1603d", "#999999"


def plot_plan(setting: Setting, simulated: SimulationResult | None, path: Path) -> None:
    """Closed form over utilization, the setting's point, and the simulated one where there is one."""
    figure = _figure()
    axes = figure.subplots()
    rhos = [0.3 + 0.01 * i for i in range(171)]
    predictions = [planner.predict(replace(setting, rho=rho)) for rho in rhos]
    axes.plot(rhos, [p.staleness for p in predictions], color=_BLUE, label="staleness")
    axes.plot(rhos, [p.pqs for p in predictions], color=_BLUE, linestyle="--", linewidth=1, label="pre-queue")
    axes.plot(rhos, [p.iqs for p in predictions], color=_RED, linestyle="--", linewidth=1, label="in-queue")
    axes.axvspan(ROUGH_ABOVE, ROUGH_BELOW, color=_GREY, alpha=0.15, label="closed form rough")
    axes.plot([setting.rho], [planner.predict(setting).staleness], "o", color=_BLUE)
    if simulated is not None:
        axes.plot([setting.rho], [simulated.staleness], "s", color=_RED, label="simulated")
    axes.set_xlabel("utilization ρ")
    axes.set_ylabel("versions")
    axes.set_ylim(bottom=0)
    axes.legend()
    _save(figure, path)


def plot_frontier(front: Sequence[Choice], best: Choice, path: Path) -> None:
    """Staleness over period/√B of the choices that none beats."""
    figure = _figure()
    axes = figure.subplots()
    axes.plot([c.noise_adjusted_s for c in front], [c.prediction.staleness for c in front], "o-", color=_BLUE)
    axes.plot([best.noise_adjusted_s], [best.prediction.staleness], "o", color=_RED, label="recommended", markersize=10)
    for choice in front:
        text = f"{choice.rollout_gpus}+{choice.train_gpus}, N {choice.setting.groups_per_batch}"
        at = (choice.noise_adjusted_s, choice.prediction.staleness)
        axes.annotate(text, at, xytext=(4, 4), textcoords="offset points", fontsize=7)
    axes.set_xscale("log")
    axes.set_xlabel("period / √B, seconds")
    axes.set_ylabel("staleness, versions")
    axes.set_ylim(bottom=0)
    axes.legend()
    _save(figure, path)


def plot_simulation(result: SimulationResult, title: str, path: Path) -> None:
    """Trained groups by staleness."""
    figure = _figure()
    axes = figure.subplots()
    total = sum(result.staleness_counts)
    axes.bar(range(len(result.staleness_counts)), [n / total for n in result.staleness_counts], color=_BLUE)
    axes.axvline(result.staleness, color=_RED, label=f"mean {result.staleness:.2f}")
    axes.set_title(f"{title}: length bias {result.length_bias:+.1%}, period {result.train_period_ratio:.2f} of ideal")
    axes.set_xlabel("staleness, versions")
    axes.set_ylabel("share of trained groups")
    axes.legend()
    _save(figure, path)


def plot_trials(trials: Sequence[Trial], title: str, path: Path) -> None:
    """Staleness and length bias of policies, one beside the other."""
    figure = _figure()
    left, right = figure.subplots(1, 2, sharey=True)
    names = [trial.name if trial.keeps_pace else f"{trial.name} (too slow)" for trial in trials]
    at = range(len(trials))
    left.barh(at, [trial.result.staleness for trial in trials], color=_BLUE, label="mean")
    left.plot(
        [trial.result.staleness_p95 for trial in trials], at, "|", color=_RED, markersize=10, label="95th percentile"
    )
    left.set_yticks(at, names, fontsize=8)
    left.invert_yaxis()
    left.set_xlabel("staleness, versions")
    left.legend(fontsize=7)
    right.barh(at, [100 * trial.result.length_bias for trial in trials], color=_GREY)
    right.axvline(0, color="black", linewidth=0.8)
    right.set_xlabel("length bias, %")
    figure.suptitle(title)
    _save(figure, path)


def plot_frontiers(settings: Mapping[str, Sequence[Point]], path: Path) -> None:
    """Staleness over throughput of the same policies in each setting, by number; large those that none beats there."""
    figure = _figure(12.0, 8.0)
    keys, drawn = cast("Sequence[SubFigure]", figure.subfigures(1, 2, width_ratios=(1, 3.2)))
    panels = drawn.subplots(2, (len(settings) + 1) // 2, squeeze=False).flat
    colours = None
    for axes, (setting, points) in zip(panels, settings.items(), strict=False):
        for kept in (False, True):
            shown = [point for point in points if (not beaten_by(point, points)) == kept]
            colours = axes.scatter(
                [point.throughput for point in shown],
                [point.staleness for point in shown],
                c=[100 * abs(point.bias) for point in shown],
                s=70 if kept else 15,
                cmap="YlOrRd",
                vmin=0,
                vmax=30,
                edgecolors="black",
                linewidths=1.0 if kept else 0.3,
            )
        line = max(point.staleness for point in points) / 22
        labels: dict[tuple[bool, float, float], list[int]] = {}
        for number, point in enumerate(points, 1):
            beaten = bool(beaten_by(point, points))
            across, up = round(point.throughput * 20) / 20, line * round(point.staleness / line)
            labels.setdefault((beaten, across, up), []).append(number)
        for (beaten, across, up), numbers in labels.items():
            axes.annotate(
                ", ".join(map(str, numbers)),
                (across, up),
                xytext=(-9, -2) if beaten else (0, -13),
                textcoords="offset points",
                fontsize=6,
                color="dimgrey" if beaten else "black",
                weight="normal" if beaten else "bold",
                ha="right" if beaten else "center",
            )
        axes.set_title(setting, fontsize=9)
        axes.set_xlabel("throughput, share of the ideal", fontsize=8)
        axes.set_ylabel("staleness, versions", fontsize=8)
    if colours is not None:
        drawn.colorbar(colours, ax=drawn.axes, label="length bias, %")
    names = [
        fill(f"{number + 1} {same[0].name}{' ×' if beaten else ''}", 46, subsequent_indent="     ")
        for number, same in enumerate(zip(*settings.values(), strict=True))
        for beaten in [all(beaten_by(points[number], points) for points in settings.values())]
    ]
    keys.text(0.02, 0.99, "\n".join([*names, "", "× beaten in each of these settings"]), fontsize=6.2, va="top")
    _save(figure, path)


def _figure(width: float = 7.0, height: float = 4.2) -> "Figure":
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - an extra
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise InvalidField("--plot", "a picture", "drawn only with matplotlib: install rollout-buffer[lab]") from error
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: "Figure", path: Path) -> None:
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise InvalidField("--plot", str(path), f"a file that can be written ({error})") from error
