"""Filter of a run: groups that it ends, groups that pass, and whether it starves the trainer."""

from collections.abc import Sequence

from buffer_service.domain.ops import RunView
from buffer_service.domain.policy import RunPolicy
from buffer_service.rules.filters import FILTERS, REASONS


def filtered(view: RunView) -> dict[str, int]:
    """Groups filtered so far, by reason."""
    return {reason: view.statistics[f"filtered_{reason}"] for reason in REASONS}


def recent_acceptance(view: RunView) -> float:
    """Share of the recent groups that pass, 0 to 1."""
    return view.statistics["recent_acceptance_ppm"] / 1_000_000


def filters(policy: RunPolicy) -> bool:
    """True when the policy filters anything; the recent acceptance stands still where it does not."""
    return any(getattr(policy, each.field) != each.off for each in FILTERS)


def starved(view: RunView) -> bool:
    """True when fewer of the recent groups pass than the policy calls enough."""
    passing = view.statistics["recent_acceptance_ppm"]
    return filters(view.policy) and passing < 1_000 * view.policy.min_acceptance_milli


def passed_over(view: RunView) -> Sequence[str]:
    """Sentences on groups that left a stage without its columns; those of the stage `rewards` no filter has judged."""
    judged = {"rewards": ": no filter by rewards has judged them, and their rewards are their worker's"}
    return [
        f"{one.passed_over:,} groups left the stage {one.name} without its columns, since the policy named it no more"
        f"{judged.get(one.name, '')}"
        for one in view.stages
        if one.passed_over
    ]
