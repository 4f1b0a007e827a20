"""The report: medians of the turns, ratios within runs, goals, and the tables."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bench.measure import median
from bench.peers.groups import DURABLE, SIZES, Size
from bench.peers.runs import Turn
from bench.peers.sides.kinds import FLOOR, PIPELINED, REVERB, STREAMS, Kind, default_way

_NAMES = [size.name for size in SIZES]

Turns = Mapping[Kind, Sequence[Turn]]

PARTS = ("service", "store", "producer", "consumer")
TIMES = ("latency_p50_ms", "latency_p99_ms", "pull_p50_ms")
DURABLE_GOAL = 5 * 17
"""Groups of 1.25 MiB a second with durability `host`: five times a queue of this field that journals to SQLite."""

GOALS: Mapping[str, tuple[str, tuple[float | None, ...]]] = {
    "groups_per_s_over_streams": ("≥", (1.0, 1.25, 1.6)),
    "groups_per_s_over_reverb": ("≥", (2.0, 2.0, 2.5)),
    "server_cpu_over_streams": ("≤", (2.5, 1.6, 1.2)),
    "latency_p50_over_reverb": ("≤", (1.0, 1.0, 1.0)),
    "pull_p50_over_streams": ("≤", (None, 1.3, None)),
    "service_mb_over_idle": ("≤", (None, None, 64.0)),
}
"""Goals of the way that is taken by default, for the three sizes."""


def results(measured: Mapping[Size, Turns], durable: Turns) -> dict[str, Any]:
    """All figures, ready for JSON: of each size its `sides`, and `figures` of both ways over the others."""
    return {
        "sizes": {size.name: _of_size(size, turns) for size, turns in measured.items()},
        "durable": {
            "group_bytes": DURABLE.group_bytes,
            "default": default_way(DURABLE).name,
            "groups_per_s": {kind.name: median([turn.groups_per_s for turn in its]) for kind, its in durable.items()},
        },
    }


def _of_size(size: Size, turns: Turns) -> dict[str, Any]:
    return {
        "group_bytes": size.group_bytes,
        "default": default_way(size).name,
        "sides": {kind.name: _of_side(its) for kind, its in turns.items()},
        "figures": {kind.name: _figures(kind, turns) for kind in turns if kind.module == "ours"},
    }


def _of_side(turns: Sequence[Turn]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "groups_per_s": median([turn.groups_per_s for turn in turns]),
        "cpu_ms": {
            part: median([1e3 * turn.cpu_s[part] for turn in turns]) for part in PARTS if part in turns[0].cpu_s
        },
        "all_groups_per_s": [round(turn.groups_per_s, 1) for turn in turns],
    }
    if turns[0].direct is not None:
        row["direct"] = min(turn.direct or 0.0 for turn in turns)
    if turns[0].latency_s:
        row["latency_p50_ms"] = median([_percentile(turn.latency_s, 50) for turn in turns])
        row["latency_p99_ms"] = median([_percentile([one for turn in turns for one in turn.latency_s], 99)])
        row["pull_p50_ms"] = median([_percentile(turn.pull_s, 50) for turn in turns])
    return row


def _percentile(seconds: Sequence[float], percent: int) -> float:
    return 1e3 * sorted(seconds)[min(len(seconds) - 1, len(seconds) * percent // 100)]


def _server_s(turn: Turn) -> float:
    return sum(turn.cpu_s.get(part, 0.0) for part in ("service", "store"))


def _figures(ours: Kind, turns: Turns) -> dict[str, float]:
    own = turns[ours]

    def over(kind: Kind, of: Callable[[Turn], float]) -> float:
        return median([of(a) / of(b) for a, b in zip(own, turns[kind], strict=True)])

    def p50(turn: Turn) -> float:
        return _percentile(turn.latency_s, 50)

    def pull(turn: Turn) -> float:
        return _percentile(turn.pull_s, 50)

    told = {"service_mb_over_idle": median([turn.service_bytes / 1e6 for turn in own])}
    for name, kind in (("streams", STREAMS), ("pipelined", PIPELINED), ("reverb", REVERB), ("floor", FLOOR)):
        if kind not in turns:
            continue
        told[f"groups_per_s_over_{name}"] = over(kind, lambda turn: turn.groups_per_s)
        told[f"server_cpu_over_{name}"] = over(kind, _server_s)
        if kind.whole:
            told[f"latency_p50_over_{name}"] = over(kind, p50)
            told[f"pull_p50_over_{name}"] = over(kind, pull)
    return told


# ── text ─────────────────────────────────────────────────────────────────────


def told(report: Mapping[str, Any]) -> Iterator[str]:
    """Lines for the terminal: every side of every size, then the goals."""
    heads = "".join(f"{part:>10}" for part in PARTS)
    for name, size in report["sizes"].items():
        yield f"{name}: {size['group_bytes']:,} bytes; by default {size['default']}"
        yield f"  {'':26}{'':9}  {'CPU ms a group':>40}{'latency, ms':>17}{'pull, ms':>10}"
        yield f"  {'':26}{'groups/s':>9}  {heads}{'p50':>8}{'p99':>9}{'p50':>10}"
        for side, row in size["sides"].items():
            cpu = "".join(f"{row['cpu_ms'].get(part, 0):10.3f}" for part in PARTS)
            times = [f"{row[key]:.2f}" if key in row else "" for key in TIMES]
            way = f"   {row['direct']:.0%} direct" if "direct" in row else ""
            yield f"  {side:26}{row['groups_per_s']:9,.0f}  {cpu}{times[0]:>8}{times[1]:>9}{times[2]:>10}{way}"
    for side, flow in report["durable"]["groups_per_s"].items():
        yield f"durability host, {report['durable']['group_bytes']:,} bytes, {side}: {flow:,.1f} groups/s"
    yield from goals(report)


def goals(report: Mapping[str, Any]) -> Iterator[str]:
    """A line for each goal: what it is, what was measured, and whether it is met."""
    for name, (sign, wanted) in GOALS.items():
        for size, its in report["sizes"].items():
            came, goal = its["figures"].get(its["default"], {}).get(name), wanted[_NAMES.index(size)]
            if goal is not None and came is not None:
                yield _goal(f"{name} at {size}", came, sign, goal)
    durable = report["durable"]
    if (came := durable["groups_per_s"].get(durable["default"])) is not None:
        yield _goal("groups_per_s with durability host", came, "≥", DURABLE_GOAL)


def _goal(what: str, came: float, sign: str, goal: float) -> str:
    met = came >= goal if sign == "≥" else came <= goal
    return f"{'met   ' if met else 'MISSED'} {what}: {came:g} (goal {sign} {goal:g})"
