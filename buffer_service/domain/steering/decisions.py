"""A decision of the controller, and all that it is made from."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from buffer_service.domain.policy import UNSET, RunPolicy
from buffer_service.domain.steering.knobs import NOTHING_LOWERED, Knobs
from buffer_service.domain.window import Snapshot


class Outcome(StrEnum):
    """Outcome of a decision."""

    MOVED = "moved"
    SETTLING = "settling"
    """The last move does not show yet."""
    HOLDING = "holding"
    OPEN = "open"
    """Fresher than the target, and nothing that was lowered keeps it so."""
    OUT_OF_REACH = "out_of_reach"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A decision, as the store keeps it: one for each publish."""

    version: int = UNSET
    """Published version at which it was made; UNSET: none was made yet."""
    moved_at: int = UNSET
    """Version of the last move."""
    moves: int = 0
    pace_milli: int = 0
    """Share of a whole correction that the last one was, in thousandths; negative: downwards. 0: none was made yet."""
    target_milli: int = 0
    """Target that it was made for."""
    by_token: bool = False
    knobs: Knobs = NOTHING_LOWERED
    outcome: Outcome = Outcome.OPEN
    measured_milli: int = UNSET
    """Mean staleness by the target's measure, in thousandths of a version; UNSET: not measured yet."""
    reason: str = ""
    """A sentence: what was measured, and what was moved or why nothing was."""


NO_DECISION = Decision()


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A run right after a publish."""

    policy: RunPolicy
    """Policy as the user stated it."""
    world_size: int
    version: int
    """The published one."""
    decided: Decision
    """The last decision."""
    snapshots: Sequence[Snapshot]
    """Totals at the last publishes, oldest first, this one last."""
    held_at: int = UNSET
    """Published version at which the caps of admission last held an engine back; UNSET: never."""
