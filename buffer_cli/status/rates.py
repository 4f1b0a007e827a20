"""Rates of a run between two snapshots of it: from totals that only grow."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

from buffer_service.domain.ops import RunView

_LOST = ("dropped_overflow", "dropped_stale", "recycled", "filtered", "rejected", "discarded", "lost")
"""States of groups that end outside of training."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Totals of a run at a moment of the watcher's own clock, in seconds. Nothing in `totals` shrinks while the run is
    the same one, but what a resume takes back.
    """

    at_s: float
    created_ms: int
    totals: Mapping[str, int]

    @classmethod
    def at(cls, view: RunView, at_s: float) -> Self:
        """Snapshot of a run that was just read."""
        statistics = view.statistics
        return cls(
            at_s,
            view.created_ms,
            {
                "steps": view.next_step,
                "publishes": view.published.version,
                "accepted groups": statistics["accepted_groups"],
                "accepted response tokens": statistics["accepted_response_tokens"],
                "assembled groups": statistics["assembled_groups"],
                "groups not trained": sum(view.groups[state].groups for state in _LOST),
                "decoded tokens": statistics["decoded_tokens"],
                "leases": statistics["leases_granted"],
                "expired leases": statistics["leases_expired"],
                "failed tasks": view.tasks["failed"],
                "trainer busy ms": statistics["trainer_busy_ms"],
                "trainer waiting ms": statistics["trainer_wait_ms"],
            },
        )


@dataclass(frozen=True, slots=True)
class Rates:
    """Growth of a run's totals between two snapshots."""

    seconds: float
    grown: Mapping[str, int]

    @classmethod
    def between(cls, before: Snapshot, after: Snapshot) -> Self | None:
        """None where nothing can be said: another run of the same name, or no time between them."""
        if before.created_ms != after.created_ms or after.at_s <= before.at_s:
            return None
        # A resume sets steps and versions back.
        grown = {name: max(0, total - before.totals[name]) for name, total in after.totals.items()}
        return cls(after.at_s - before.at_s, grown)

    def per_second(self, name: str) -> float:
        """Growth of a total, per second."""
        return self.grown[name] / self.seconds

    def values(self) -> dict[str, float]:
        """Growth of all totals, per second."""
        return {name: self.per_second(name) for name in self.grown}

    @property
    def trainer_waiting(self) -> float | None:
        """Share of its own time that the trainer waited for batches; None when it reported none."""
        busy, waiting = self.grown["trainer busy ms"], self.grown["trainer waiting ms"]
        return waiting / (busy + waiting) if busy + waiting else None

    def shown(self) -> Iterator[tuple[str, str]]:
        """Names and figures, as people read them."""
        for name in ("accepted groups", "assembled groups", "groups not trained"):
            yield name, f"{number(self.per_second(name))}/s"
        for name in ("accepted response tokens", "decoded tokens"):
            yield name, f"{number(self.per_second(name))}/s"
        for name in ("steps", "publishes"):
            yield name, f"{number(60 * self.per_second(name))}/min"
        for name in ("leases", "expired leases"):
            yield name, f"{number(self.per_second(name))}/s"
        yield "failed tasks", f"{self.grown['failed tasks']:,}"
        waiting = self.trainer_waiting
        yield "trainer waiting", "-" if waiting is None else f"{waiting:.0%}"


def number(value: float) -> str:
    """Three figures that count: 0, 0.12, 3.4, 56, 7,890."""
    if value == 0:
        return "0"
    if value < 1:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"
