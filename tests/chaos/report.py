"""Report of a chaos run: counts, violations, and how long nothing went on after each kind of fault."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from tests.chaos.bout import Bout
from tests.chaos.recovery import Gap, bound_s, gaps_of


def recovery(bouts: Iterable[Bout]) -> dict[str, dict[str, Any]]:
    """Times without progress, by fault: their number, and medians and maxima in seconds."""
    found: dict[str, list[Gap]] = defaultdict(list)
    for each in bouts:
        for gap in gaps_of(each.events):
            found[gap.what].append(gap)
    return {what: _summed(what, gaps) for what, gaps in sorted(found.items())}


def late(bout: Bout) -> list[dict[str, Any]]:
    """Strikes of a bout after which the next step came later than is promised."""
    return [
        {"what": gap.what, "lasts_s": round(gap.lasts_s, 2), "step_s": round(gap.step_s, 2)}
        for gap in gaps_of(bout.events)
        if gap.is_late
    ]


def _summed(what: str, gaps: Sequence[Gap]) -> dict[str, Any]:
    summed: dict[str, Any] = {
        "count": len(gaps),
        "bound_s": bound_s(what),
        "late": sum(gap.is_late for gap in gaps),
    }
    for name in ("lasts", "group", "step"):
        values = [getattr(gap, f"{name}_s") for gap in gaps]
        summed[f"{name}_median_s"] = round(statistics.median(values), 2)
        summed[f"{name}_max_s"] = round(max(values), 2)
    return summed


def counts(bouts: Sequence[Bout]) -> dict[str, int]:
    """Numbers of the whole run."""
    strikes = [op for each in bouts for op in each.strikes()]

    def number(kind: str) -> int:
        return sum(len(each.events.of(kind, ok=True)) for each in bouts)

    pushes = [op for each in bouts for op in each.events.of("push", ok=True)]
    return {
        "bouts": len(bouts),
        "kills": sum(bool(op.given["kills"]) for op in strikes),
        "other_faults": sum(not op.given["kills"] for op in strikes),
        "groups_acknowledged": sum(op.got["outcome"] in ("queued", "duplicate", "filtered") for op in pushes),
        "leases": sum(len(op.got["leases"]) for each in bouts for op in each.events.of("lease", ok=True)),
        "pulls": number("pull"),
        "publishes": number("publish"),
        "resumes": number("resume"),
        "views": number("view"),
        **{name: sum(each.session[name] for each in bouts) for name in bouts[0].session},
        "bouts_of_real_engines": sum(each.scenario.real for each in bouts),
        "bouts_from_the_last_release": sum(each.scenario.upgraded for each in bouts),
        "violations": sum(len(each.problems) for each in bouts),
    }


def report(seed: int, bouts: Sequence[Bout]) -> dict[str, Any]:
    """Everything, as JSON."""
    return {
        "seed": seed,
        "counts": counts(bouts),
        "recovery": recovery(bouts),
        "bouts": [
            {
                **each.scenario.described(),
                "seconds": each.seconds,
                "strikes": len(each.strikes()),
                "events": len(each.events.ops),
                "problems": each.problems,
                "late": late(each),
            }
            for each in bouts
        ],
    }


def table(made: dict[str, Any]) -> str:
    """Table of the times without progress, for pages and terminals."""
    lines = [
        "| fault | times | lasts s | no group for s: median, longest | no step for s | bound s | above |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {what} | {it['count']} | {it['lasts_median_s']} | {it['group_median_s']}, {it['group_max_s']}"
        f" | {it['step_median_s']}, {it['step_max_s']} | {it['bound_s']:g} | {it['late']} |"
        for what, it in made["recovery"].items()
    ]
    return "\n".join(lines)
