"""Statistics of a run: counters of its ledger, each with a field of the wire's RunStatistics of the same name."""

from collections.abc import Mapping
from dataclasses import dataclass

from buffer_service.rules.filters import FILTERS


@dataclass(frozen=True, slots=True)
class Statistic:
    """A counter. Without `metric`, another metric shows it."""

    metric: str = ""
    """Name of the metric, without prefix and suffix."""
    text: str = ""
    """Description of the metric."""
    begins: int = 0


STATISTICS: Mapping[str, Statistic] = {
    "leases_granted": Statistic("leases_granted", "Leases given to workers."),
    "leases_expired": Statistic("leases_expired", "Leases that ended without a word of their worker."),
    "leases_returned": Statistic("leases_returned", "Leases handed back unfinished."),
    "leases_cancelled": Statistic(
        "leases_cancelled", "Leases taken back because their group could no longer be fresh."
    ),
    "pushes_duplicate": Statistic("pushes_duplicate", "Pushed groups that had been accepted before."),
    "pushes_closed": Statistic("pushes_closed", "Pushed groups that were not needed any more."),
    "pushes_rejected": Statistic(
        "pushes_rejected", "Pushed groups that met a full queue under overflow action reject."
    ),
    "written_groups": Statistic(
        "written_groups", "Accepted groups whose payload their pusher wrote to the store itself."
    ),
    "written_bytes": Statistic(
        "written_bytes", "Bytes of accepted payloads that their pushers wrote to the store themselves."
    ),
    "assembled_groups_spanning_versions": Statistic(
        "assembled_groups_spanning_versions",
        "Groups of assembled steps whose tokens came from more than one weight version.",
    ),
    "partial_rollout_tokens_discarded": Statistic(
        "partial_rollout_discarded_tokens",
        "Tokens of partial rollouts that were given up because their head was too stale.",
    ),
    "partial_rollouts_beyond_spread": Statistic(
        "partial_rollouts_beyond_spread",
        "Partial rollouts given up because the engine was too many versions ahead of them.",
    ),
    "staleness_max": Statistic(),
    "recent_acceptance_ppm": Statistic(begins=1_000_000),
    **{each.statistic: Statistic() for each in FILTERS},
}
