"""Report of a chaos run: counts, violations, and how long nothing went on after each kind of fault.

A fault's time is that until the next one, and on to the first progress after it.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from tests.chaos.bout import Bout
from tests.chaos.checker.events import Events, Op

KINDS = {"push": "group", "publish": "step"}
BOUND_S = 5.0
BOUNDS_S = {
    "everything but the store is killed": 15.0,
    "the primary is killed": 10.0,
    "the primary is killed, its replica behind": 10.0,
    "a shard's primary is killed": 10.0,
    "a trainer is killed": 10.0,
    "connections swallow everything": 10.0,
}
"""Longest times without a step beyond a fault's own length that docs/operations.md promises, in seconds; of other
faults BOUND_S.
"""
NO_FAULT = "no fault"


def without_progress(ends: Sequence[float], begin: float, over: float, until: float) -> float:
    """Longest time between two ends, in seconds, of a fault that lasted from `begin` to `over`.

    Looks as far as `until`, when the next fault begins, and beyond it only where nothing has gone on since `over`.
    """
    within = [at for at in ends if begin < at <= until]
    if within and within[-1] > over:
        return max(later - at for at, later in pairwise([begin, *within]))
    return max(
        (later - at for at, later in pairwise([begin, *within, *[at for at in ends if at > until][:1]])), default=0.0
    )


def ends_of(events: Events, kind: str) -> list[float]:
    """Moments at which calls of a kind were acknowledged."""
    return sorted(op.end_s for op in events.of(kind, ok=True))


def recovery(bouts: Iterable[Bout]) -> dict[str, dict[str, Any]]:
    """Times without progress, by fault: their number, and medians and maxima in seconds."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for each in bouts:
        ends = {kind: ends_of(each.events, kind) for kind in KINDS}
        marks = each.events.of("begins", "strike", "ends", ok=True)
        for op, after in pairwise(marks):
            what = str(op.given.get("what", NO_FAULT))
            found[what]["lasts"].append(op.end_s - op.begin_s)
            for kind, name in KINDS.items():
                found[what][name].append(without_progress(ends[kind], op.begin_s, op.end_s, after.begin_s))
    return {what: _summed(what, times) for what, times in sorted(found.items())}


def _summed(what: str, times: dict[str, list[float]]) -> dict[str, Any]:
    bound = BOUNDS_S.get(what, BOUND_S)
    late = sum(gap - lasts > bound for gap, lasts in zip(times["step"], times["lasts"], strict=True))
    summed: dict[str, Any] = {"count": len(times["lasts"]), "bound_s": bound, "late": late}
    for name, values in times.items():
        summed[f"{name}_median_s"] = round(statistics.median(values), 2)
        summed[f"{name}_max_s"] = round(max(values), 2)
    return summed


def counts(bouts: Sequence[Bout]) -> dict[str, int]:
    """Numbers of the whole run."""
    strikes: list[Op] = [op for each in bouts for op in each.strikes()]

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
