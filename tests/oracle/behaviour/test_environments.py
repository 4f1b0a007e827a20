"""Ledgers by environment, and how many environments a run may have."""

import pytest

from buffer_service.domain.ops import Amount, PushKind
from buffer_service.domain.policy import MAX_ENVIRONMENTS
from buffer_wire.errors import InvalidField
from tests.oracle.behaviour.world import World, shares
from tests.oracle.rules.ledger import add


def states(world: World, environment: str) -> dict[str, int]:
    """Groups by state, where there are any."""
    entries = world.view.environments[environment].items()
    return {str(state): amount.groups for state, amount in entries if amount.groups}


def test_every_disposition_is_counted_in_the_environment_of_the_group() -> None:
    world = World(batch_groups=1, max_queued_groups=2, filter_max_mean_reward_milli=900)
    world.push("c1", environment="code", tokens=30)
    world.batch()
    world.commit(0)
    world.push("c2", environment="code")
    world.push("m1")
    world.push("m2")
    world.push("m3", mean_reward_milli=1_000)
    world.batch()
    assert states(world, "code") == {"accepted": 2, "trained": 1, "dropped_overflow": 1}
    assert states(world, "math") == {"accepted": 3, "delivered": 1, "queued": 1, "filtered": 1}
    assert world.view.environments["code"]["trained"] == Amount(groups=1, samples=2, tokens=30, bytes=100)


def test_environments_add_up_to_the_run() -> None:
    world = World(batch_groups=2, micro_batch_groups=1, max_queued_groups=4, environments=shares(a=1, b=1))
    for name in ("a1", "b1", "a2", "c1", "b2"):
        world.push(name, environment=name[0])
    world.batch()
    total = Amount()
    for environment in ("a", "b", "c"):
        total = add(total, world.view.environments[environment]["accepted"])
    assert total == world.view.groups["accepted"]
    assert world.groups("forming") == 1


def test_an_environment_of_which_nothing_was_accepted_has_no_ledger() -> None:
    world = World(environments=shares(rule=1))
    world.submit("a", environment="task")
    assert world.view.environments == {}


def test_a_group_counts_in_its_own_environment_not_in_that_of_its_task() -> None:
    world = World()
    world.submit("a", environment="task")
    world.push(world.lease_one(), environment="group")
    assert list(world.view.environments) == ["group"]


def crowded(taken: int) -> World:
    world = World(batch_groups=1, max_pending_tasks=1_000, overflow_action="reject")
    for index in range(taken):
        world.submit(f"t{index}", environment=f"e{index}")
    return world


def test_tasks_of_one_environment_too_many_are_refused_all_together() -> None:
    world = crowded(MAX_ENVIRONMENTS - 1)
    world.submit("last", environment="last")
    before = world.view
    with pytest.raises(InvalidField) as refused:
        world.submit("x", environment="one too many")
    assert refused.value.attributes == {
        "field": "tasks[0].environment",
        "value": "'one too many'",
        "limit": "one of the run's 256 environments",
    }
    assert world.view == before
    world.submit("y", environment="last")


def test_a_group_of_one_environment_too_many_is_invalid_before_filter_and_room_are_looked_at() -> None:
    world = crowded(MAX_ENVIRONMENTS)
    world.push("full", environment="e0")
    world.change(filter_equal_rewards=True)
    (pushed,) = world.push_facts(world.facts("own", environment="new", equal_rewards=True))
    assert (pushed.kind, pushed.field, pushed.value) == (PushKind.INVALID, "environment", "new")
    assert pushed.limit == "one of the run's 256 environments"
    assert world.push("full", environment="new") is PushKind.DUPLICATE
    assert world.push("own", environment="e7") is PushKind.REJECTED_FULL


def test_a_refused_group_leaves_its_environment_to_others() -> None:
    world = crowded(MAX_ENVIRONMENTS - 1)
    world.queue(1, environment="e0")
    assert world.push("rejected", environment="new") is PushKind.REJECTED_FULL
    world.batch()
    assert world.push("accepted", environment="another") is PushKind.QUEUED
