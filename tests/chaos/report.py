"""Report of a chaos run: counts, violations, and how long nothing went on after each kind of fault."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from tests.chaos.bout import Bout
from tests.chaos.recovery import bound_s, gaps_of


def recovery(bouts: Iterable[Bout]) -> dict[str, dict[str, Any]]:
    """Times without progress, by fault: their number, and medians and maxima in seconds."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for each in bouts:
        for gap in gaps_of(each.events):
            for name, value in (("lasts", gap.lasts_s), ("group", gap.group_s), ("step", gap.step_s)):
                found[gap.what][name].append(value)
    return {what: _summed(what, times) for what, times in sorted(found.items())}


def _summed(what: str, times: dict[str, list[float]]) -> dict[str, Any]:
    bound = bound_s(what)
    late = sum(gap - lasts > bound for gap, lasts in zip(times["step"], times["lasts"], strict=True))
    summed: dict[str, Any] = {"count": len(times["lasts"]), "bound_s": bound, "late": late}
    for name, values in times.items():
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
