"""Report of a chaos run: counts, violations, and how long nothing went on after each kind of fault.

A fault's time is that until the next one, and on to the first progress after it.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from tests.chaos.checker.events import Events, Op
from tests.chaos.round import Round

KINDS = {"push": "group", "publish": "step"}
NO_FAULT = "no fault"


def without_progress(ends: Sequence[float], begin: float, end: float) -> float:
    """Longest time between two ends, from `begin` until the first one after `end`, in seconds."""
    times = [begin, *(at for at in ends if begin < at <= end), *[at for at in ends if at > end][:1]]
    return max((later - at for at, later in pairwise(times)), default=0.0)


def ends_of(events: Events, kind: str) -> list[float]:
    """Moments at which calls of a kind were acknowledged."""
    return sorted(op.end_s for op in events.of(kind, ok=True))


def recovery(rounds: Iterable[Round]) -> dict[str, dict[str, Any]]:
    """Times without progress, by fault: their number, and medians and maxima in seconds."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for each in rounds:
        ends = {kind: ends_of(each.events, kind) for kind in KINDS}
        marks = each.events.of("begins", "strike", "ends", ok=True)
        for op, after in pairwise(marks):
            what = str(op.given.get("what", NO_FAULT))
            found[what]["lasts"].append(op.end_s - op.begin_s)
            for kind, name in KINDS.items():
                until = after.begin_s if op.kind == "strike" else op.begin_s
                found[what][name].append(without_progress(ends[kind], op.begin_s, until))
    return {what: _summed(times) for what, times in sorted(found.items())}


def _summed(times: dict[str, list[float]]) -> dict[str, Any]:
    summed: dict[str, Any] = {"count": len(times["lasts"])}
    for name, values in times.items():
        summed[f"{name}_median_s"] = round(statistics.median(values), 2)
        summed[f"{name}_max_s"] = round(max(values), 2)
    return summed


def counts(rounds: Sequence[Round]) -> dict[str, int]:
    """Numbers of the whole run."""
    strikes: list[Op] = [op for each in rounds for op in each.strikes()]

    def number(kind: str) -> int:
        return sum(len(each.events.of(kind, ok=True)) for each in rounds)

    pushes = [op for each in rounds for op in each.events.of("push", ok=True)]
    return {
        "rounds": len(rounds),
        "kills": sum(bool(op.given["kills"]) for op in strikes),
        "other_faults": sum(not op.given["kills"] for op in strikes),
        "groups_acknowledged": sum(op.got["outcome"] in ("queued", "duplicate", "filtered") for op in pushes),
        "leases": sum(len(op.got["leases"]) for each in rounds for op in each.events.of("lease", ok=True)),
        "pulls": number("pull"),
        "publishes": number("publish"),
        "resumes": number("resume"),
        "views": number("view"),
        "violations": sum(len(each.problems) for each in rounds),
    }


def report(seed: int, rounds: Sequence[Round]) -> dict[str, Any]:
    """Everything, as JSON."""
    return {
        "seed": seed,
        "counts": counts(rounds),
        "recovery": recovery(rounds),
        "rounds": [
            {
                **each.scenario.described(),
                "seconds": each.seconds,
                "strikes": len(each.strikes()),
                "events": len(each.events.ops),
                "problems": each.problems,
            }
            for each in rounds
        ],
    }


def table(made: dict[str, Any]) -> str:
    """Table of the times without progress, for pages and terminals."""
    lines = [
        "| fault | times | lasts s | no group for s, median, longest | no step for s, median, longest |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {what} | {it['count']} | {it['lasts_median_s']} | {it['group_median_s']}, {it['group_max_s']}"
        f" | {it['step_median_s']}, {it['step_max_s']} |"
        for what, it in made["recovery"].items()
    ]
    return "\n".join(lines)
