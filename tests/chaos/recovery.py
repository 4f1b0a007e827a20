"""Times without progress in a bout, by its faults, and how long they may be.

A fault's time is that until the next one, and on to the first progress after it. Where another one began before a step
was due, the step is due by the bound of that one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tests.chaos.checker.events import Events, Op

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
STANDSTILL_S = 30.0
"""Time without a step beyond a fault's own length from which on it is a violation, whatever struck meanwhile."""


@dataclass(frozen=True)
class Gap:
    """Longest times without an acknowledged group, and without a published step, of one fault, in seconds."""

    what: str
    lasts_s: float
    group_s: float
    step_s: float
    due_s: float
    """Longest time without a step that is promised for this fault, its own length included."""

    @property
    def is_late(self) -> bool:
        """True where the next step came later than is promised."""
        return self.step_s > self.due_s


def bound_s(what: str) -> float:
    """Longest time without a step beyond the length of a fault of this kind that is promised, in seconds."""
    return BOUNDS_S.get(what, BOUND_S)


def gaps_of(events: Events) -> list[Gap]:
    """Gaps of a bout, by its faults in their order."""
    groups, steps = (sorted(op.end_s for op in events.of(kind, ok=True)) for kind in ("push", "publish"))
    marks = events.of("begins", "strike", "ends", ok=True)
    found = []
    for number, (op, after) in enumerate(pairwise(marks), 1):
        next_step = next((at for at in steps if at > op.end_s), after.begin_s)
        due = _due(op, [it for it in marks[number:] if it.kind == "strike" and it.begin_s < next_step])
        times = [without_progress(ends, op.begin_s, op.end_s, after.begin_s) for ends in (groups, steps)]
        found.append(Gap(_what(op), op.end_s - op.begin_s, times[0], times[1], due - op.begin_s))
    return found


def _due(op: Op, others: Sequence[Op]) -> float:
    """Time by which a step is promised after a fault, and after those of the others that began before it was due."""
    due = op.end_s + bound_s(_what(op))
    for other in others:
        if other.begin_s <= due:
            due = max(due, other.end_s + bound_s(_what(other)))
    return due


def _what(op: Op) -> str:
    return str(op.given.get("what", NO_FAULT))


def standstills(events: Events) -> list[str]:
    """Faults after which nothing went on for so long that it would not have by itself."""
    return [
        f"it stood still: no step for {gap.step_s:.1f} s after {gap.what!r}, which lasted {gap.lasts_s:.1f} s"
        for gap in gaps_of(events)
        if gap.step_s - gap.lasts_s > STANDSTILL_S
    ]


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
