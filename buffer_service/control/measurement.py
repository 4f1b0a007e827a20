"""Measurement of the time since the last move shows: means over the window, from totals at publishes."""

from collections.abc import Sequence
from dataclasses import dataclass

from buffer_service.domain.window import Snapshot, Window

MOST_PUBLISHES = 24
"""Largest number of intervals between publishes that a measurement spans: what was long ago is another regime."""

_MILLI = 1_000


@dataclass(frozen=True, slots=True)
class Measurement:
    """Means over a window; staleness in versions."""

    publishes: int
    head: float
    token: float
    pre_queue: float
    in_queue: float
    in_flight: float
    """Groups in flight at a time, by Little's law; 0: none came by a lease."""
    leased_share: float
    """Accepted groups that came by a lease, over all."""
    trainer_waits: float
    """Share of its time in which the trainer waited for groups; 0 where it does not say."""


def measured(snapshots: Sequence[Snapshot], since: int, least: int) -> Measurement | None:
    """Means over the last publishes from version `since` on; None with fewer than `least` intervals, or no group."""
    settled = [one for one in snapshots if one.version >= since][-(MOST_PUBLISHES + 1) :]
    if len(settled) <= least:
        return None
    window = Window(settled[0], settled[-1], len(settled) - 1)
    grown = window.grown
    groups, tokens = grown("assembled_groups"), grown("assembled_response_tokens")
    if not groups or not tokens:
        return None
    accepted, leased = grown("accepted_groups"), grown("generated_groups")
    busy, waits = grown("trainer_busy_ms"), grown("trainer_wait_ms")
    return Measurement(
        publishes=window.publishes,
        head=grown("staleness_sum") / groups,
        token=grown("token_staleness_milli_sum") / tokens / _MILLI,
        pre_queue=grown("pre_queue_staleness_sum") / groups,
        in_queue=grown("in_queue_staleness_sum") / groups,
        in_flight=grown("generation_ms") / 1000 / window.seconds if window.seconds else 0.0,
        leased_share=leased / accepted if accepted else 0.0,
        trainer_waits=waits / (busy + waits) if busy + waits else 0.0,
    )
