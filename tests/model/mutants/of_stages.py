"""Defects of stages."""

from buffer_service.domain.ops import GroupFacts
from tests.oracle import stages
from tests.oracle.records import Group
from tests.oracle.state import RunState


def any_lease_of_the_group_will_do(run: RunState, lease_id: str) -> Group | None:
    """Find a group that somebody else may hold by now."""
    of_group = lease_id.rpartition(":")[0]
    return next((one for one in stages.held(run) if f"{one.group_id}/{one.stage}" == of_group), None)


def failures_do_not_count(run: RunState, group: Group) -> bool:
    stages._go_back(run, group)
    return False


def stages_come_in_any_order(run: RunState, group: Group) -> str:
    done = {name for name, _ in group.added}
    return next((name for name in reversed(run.policy.stages) if name not in done), "")


def rewards_are_not_judged(run: RunState, group: Group, facts: GroupFacts) -> str | None:
    run.totals.reward(facts.reward_milli - group.facts.reward_milli)
    return None
