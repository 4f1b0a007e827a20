"""Members of a collective update and their progress, judged from the run's state alone.

A member that fails reports an error and belongs to no group any more; one that is gone reports nothing at all. Ranks
follow the order of engine ids, so that the same engines always have the same ranks.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from trainer_client.client.engines import SILENT_MS
from trainer_client.publish.collective.plan import CollectivePlan, PlanMember
from trainer_client.state import Engine, RunState

Stage: TypeAlias = Literal["prepared", "loaded"]
"""Stage that members report: "prepared" once they have joined and paused, "loaded" once they have received."""

_TAKING_PART = ("ready", "loading")


def candidates(run: RunState, left_out: Collection[str]) -> tuple[Engine, ...]:
    """Select the engines that can take part now, in the order of their ids."""
    fit = (
        e for e in run.engines if e.state in _TAKING_PART and e.silent_ms < SILENT_MS and e.engine_id not in left_out
    )
    return tuple(sorted(fit, key=lambda engine: engine.engine_id))


def others(run: RunState, members: Iterable[Engine]) -> tuple[str, ...]:
    """Name the engines that live, or may again, and are not members: they need the weights in another way."""
    inside = {engine.engine_id for engine in members}
    living = (e for e in run.engines if e.state != "stopped" and e.silent_ms < SILENT_MS)
    return tuple(engine.engine_id for engine in living if engine.engine_id not in inside)


_MOST_GROUPS = 1 << 40
"""Limit on plausible membership numbers, above the number of process groups of any run. A larger one from an engine is
ignored: 1 more may be too large for a plan."""


def next_membership(present: int, engines: Iterable[Engine]) -> int:
    """Choose a number above that of the present group, and of any that an engine is in, also an earlier trainer's."""
    known = (engine.membership for engine in engines)
    return 1 + max([present, *(number for number in known if number < _MOST_GROUPS)])


def ranked(engines: Iterable[Engine]) -> tuple[PlanMember, ...]:
    """Assign ranks to members, from 1, one per engine."""
    return tuple(PlanMember(engine.engine_id, 1 + i) for i, engine in enumerate(engines))


@dataclass(frozen=True, slots=True)
class Attendance:
    """Attendance of a plan's members: those that are not there yet, and those that have failed, with the reason."""

    missing: tuple[str, ...]
    failed: dict[str, str]


class Watch:
    """Judge of the members of one plan, by their reports since it was made."""

    def __init__(self, plan: CollectivePlan, before: RunState) -> None:
        self._plan = plan
        self._errors = {engine.engine_id: engine.errors for engine in before.engines}
        # Who has been in the group and is not any more has failed, whatever it says.
        self._inside = {e.engine_id for e in before.engines if e.membership == plan.membership}

    def judge(self, run: RunState, stage: Stage) -> Attendance:
        """Judge how far the members are towards `stage`."""
        reports = {engine.engine_id: engine for engine in run.engines}
        missing, failed = [], {}
        for member in self._plan.members:
            engine = reports.get(member.engine_id)
            why = self._failure(engine)
            if why:
                failed[member.engine_id] = why
            elif engine is not None and not self._has_reached(engine, stage):
                missing.append(member.engine_id)
        return Attendance(tuple(missing), failed)

    def _has_reached(self, engine: Engine, stage: Stage) -> bool:
        reached = engine.prepared if stage == "prepared" else engine.loaded
        return engine.membership == self._plan.membership and reached == self._plan.version

    def _failure(self, engine: Engine | None) -> str:
        """Return the reason why the member cannot go on; empty when it can."""
        if engine is None:
            return "its worker reports it no more"
        if engine.silent_ms >= SILENT_MS:
            return f"silent for {engine.silent_ms // 1000} s"
        if engine.state in ("quarantined", "stopped"):
            return f"{engine.state}: {engine.last_error or 'without an error'}"
        if engine.membership == self._plan.membership:
            self._inside.add(engine.engine_id)
        elif engine.engine_id in self._inside or engine.errors > self._errors.get(engine.engine_id, 0):
            what = "left the group" if engine.engine_id in self._inside else "cannot join"
            return f"{what}: {engine.last_error or 'without an error'}"
        return ""


def unheard(run: RunState, engine_ids: Iterable[str], since_s: float) -> tuple[str, ...]:
    """Name those of the engines whose workers have reported nothing in the last `since_s` seconds."""
    heard = {engine.engine_id for engine in run.engines if engine.silent_ms < since_s * 1000}
    return tuple(engine_id for engine_id in engine_ids if engine_id not in heard)
