"""Tables and figure of the results, as they stand in the docs and in README."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

from bench.peers.groups import SIZES
from bench.peers.report import PARTS, TIMES
from bench.peers.sides.kinds import DIRECT
from bench.tables import DOCS, put, table

FIGURE = DOCS / "images" / "peers.png"
_COLOURS = ("#1f6f54", "#7fb89f", "#c0504d", "#e3a5a3", "#7a68a6", "#bbbbbb")

RATIOS = {
    "groups_per_s_over_streams": "groups/s over Redis Streams",
    "groups_per_s_over_reverb": "over Reverb",
    "server_cpu_over_streams": "server's CPU over Redis's",
    "latency_p50_over_reverb": "latency over Reverb's",
    "pull_p50_over_streams": "pull of 32 over Redis Streams",
}

Report = Mapping[str, Any]


def write(report: Report) -> list[Path]:
    """Write both tables and the figure; the files that were written."""
    _draw(report)
    pages = [put("peers", _whole(report)), put("peers-ratios", _ratios(report))]
    return [FIGURE, *(page for page in pages if page is not None)]


def _whole(report: Report) -> list[str]:
    head = ("group", "groups/s", *(f"{part}, CPU ms" for part in PARTS), "p50 ms", "p99 ms", "pull of 32, ms")
    lines: list[str] = []
    for name, size in report["sizes"].items():
        rows = []
        for side, row in size["sides"].items():
            cpu = [f"{row['cpu_ms'][part]:.3f}" if part in row["cpu_ms"] else "–" for part in PARTS]
            times = [f"{row[key]:.1f}" if key in row else "–" for key in TIMES]
            chosen = " ¹" if side == size["default"] else ""
            rows.append((f"{name}, {side}{chosen}", f"{row['groups_per_s']:,.0f}", *cpu, *times))
        lines += table(head, rows) if not lines else table(head, rows)[2:]
    flows = report["durable"]["groups_per_s"]
    told = "; ".join(f"{side} {flow:,.0f}" for side, flow in flows.items())
    lines += ["", f"With durability `host`, groups of 1.25 MiB a second: {told}."] if flows else []
    size = report["sizes"][SIZES[-1].name]
    if direct := size["figures"].get(DIRECT.name):
        rate = size["sides"][DIRECT.name]["groups_per_s"] * size["group_bytes"] / 1e9
        more = f"the service has {direct['service_mb_over_idle']:.0f} MB more than idle"
        lines += ["", f"While {rate:.1f} GB/s of {SIZES[-1].name} groups go directly {more}."]
    return [*lines, "", _where(report)]


def _where(report: Report) -> str:
    date, load = report["time"][:10], report["load_before"]
    return f"{date}: {report['runs']} runs on {report['cores']} cores, whose load was {load} before."


def _ratios(report: Report) -> list[str]:
    """Ratios of the way that each size takes by default."""
    rows = []
    for name, size in report["sizes"].items():
        came = size["figures"][size["default"]]
        cells = [f"{came[key]:.2f} ×" if key in came else "–" for key in RATIOS]
        way = size["default"].rpartition(" ")[2]
        rows.append((name, way, f"{size['sides'][size['default']]['groups_per_s']:,.0f}", *cells))
    return [*table(("group", "way", "groups/s", *RATIOS.values()), rows), "", _where(report)]


def _draw(report: Report) -> None:
    """Groups a second of every side over Redis Streams, by size."""
    sizes = {name: its["sides"] for name, its in report["sizes"].items()}
    sides = list(dict.fromkeys(side for its in sizes.values() for side in its))
    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    width = 0.8 / len(sides)
    for number, (side, colour) in enumerate(zip(sides, _COLOURS, strict=False)):
        at = [place + number * width for place, its in enumerate(sizes.values()) if side in its]
        heights = [
            its[side]["groups_per_s"] / its["Redis Streams"]["groups_per_s"] for its in sizes.values() if side in its
        ]
        axes.bar(at, heights, width, label=side, color=colour)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(sizes))], list(sizes))
    axes.set_ylabel("groups/s over Redis Streams")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncols=2)
    figure.savefig(FIGURE, dpi=150)
    plt.close(figure)
