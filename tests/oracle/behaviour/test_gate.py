"""Staleness measures, incarnations, the spread of continued groups, and leases that are cancelled."""

import dataclasses
from typing import Any

import pytest

from buffer_service.domain import ops
from buffer_service.domain.ops import LeaseState, ResumeMode, WeightVersion
from buffer_wire.errors import InvalidPolicy
from tests.oracle.behaviour.world import World, priorities

# ── measures ──


@pytest.mark.parametrize(
    ("measure", "kept"),
    [("head", {"old mean", "old tail"}), ("mean", {"old head", "old tail"}), ("tail", {"old head", "old mean"})],
)
def test_a_group_is_gated_by_the_measure_alone(measure: str, kept: set[str]) -> None:
    world = World(batch_groups=2, max_queued_groups=3, max_staleness=2, staleness_measure=measure)
    for name, head, tail, mean in (("old head", 3, 5, 4_500), ("old mean", 4, 5, 3_999), ("old tail", 4, 3, 4_000)):
        world.push(name, head=head, tail=tail, mean_milli=mean)
    batch = world.batch(train_version=6)
    assert {group.group_id.removesuffix("/0") for group in batch.shard} == kept
    assert world.groups("dropped_stale") == 1


def test_staleness_is_reported_by_head_whatever_the_measure() -> None:
    world = World(batch_groups=1, max_staleness=1, staleness_measure="tail")
    world.push("a", head=1, tail=5)
    assert world.batch(train_version=5).staleness_sum == 4


def test_the_measure_cannot_change_under_queued_groups() -> None:
    world = World(batch_groups=1, max_queued_groups=2)
    world.queue(2)
    before = world.view
    with pytest.raises(InvalidPolicy, match="cannot change while 2 groups are queued") as refused:
        world.change(staleness_measure="mean", batch_groups=2)
    assert refused.value.attributes["field"] == "staleness_measure"
    assert world.view == before
    world.batch()
    world.batch()
    world.change(staleness_measure="mean")


def test_means_of_an_abandoned_timeline_are_clamped_where_they_are_stored_and_on_arrival() -> None:
    world = World(batch_groups=1, max_queued_groups=9, max_staleness=1, staleness_measure="mean")
    world.train(3, head=3)
    world.push("stored", head=2, tail=3, mean_milli=2_900)
    late = world.facts("late", head=WeightVersion(1, 2), tail=WeightVersion(1, 3), mean_milli=2_900)
    world.resume(1, ResumeMode.DISCARD)
    assert [pushed.kind for pushed in world.push_facts(late)] == [ops.PushKind.QUEUED]
    world.push("fresh", head=1, tail=3, mean_milli=2_000)
    assert world.names(train_version=3) == ["fresh/0"]
    assert world.groups("dropped_stale") == 2


# ── incarnations ──


def generate(world: World) -> str:
    """Generate, push and let expire the next group; its lease."""
    grant = world.lease_one()
    world.push(grant)
    assert isinstance(world.pull(train_version=1), ops.Short)
    return grant.lease_id


def test_a_task_is_recycled_until_it_has_had_its_incarnations() -> None:
    world = World(batch_groups=1, max_staleness=0, stale_action="recycle", max_incarnations=2)
    world.submit("a")
    assert [generate(world), generate(world)] == ["a/0/1", "a/1/1"]
    assert (world.groups("recycled"), world.groups("dropped_stale")) == (1, 1)
    assert (world.tasks("pending"), world.tasks("completed")) == (0, 1)
    world.train()
    world.checkpoint(0)
    world.submit("a")


def test_without_a_cap_a_task_is_recycled_for_ever() -> None:
    world = World(batch_groups=1, max_staleness=0, stale_action="recycle")
    world.submit("a")
    assert [generate(world) for _ in range(5)][-1] == "a/4/1"


def test_a_lost_group_starts_anew_whatever_the_cap() -> None:
    world = World(batch_groups=1, max_incarnations=1)
    world.submit("a")
    world.push(world.lease_one())
    world.lose(0, *world.names())
    assert world.lease_one().lease_id == "a/1/1"


# ── spread of continued groups ──


def with_partial_rollout(head: int, **policy: int) -> World:
    world = World(batch_groups=1, max_version_spread=2, **policy)
    world.submit("a")
    world.interrupt(world.lease_one().lease_id, partial_rollout=b"so far", head=head, tokens=70)
    return world


def test_a_partial_rollout_too_far_behind_the_engine_is_given_up_and_counted() -> None:
    world = with_partial_rollout(1)
    world.publish(4)
    assert world.lease_one().partial_rollout == b""
    assert world.statistic("partial_rollout_tokens_discarded") == 70
    assert world.statistic("partial_rollouts_beyond_spread") == 1


def test_the_spread_is_that_of_the_asking_engine() -> None:
    world = with_partial_rollout(1)
    world.publish(4)
    (grant,) = world.lease(loaded=WeightVersion(1, 3)).grants
    assert grant.partial_rollout == b"so far"
    assert world.statistic("partial_rollouts_beyond_spread") == 0


def test_a_partial_rollout_that_is_too_stale_anyway_does_not_count_as_beyond_the_spread() -> None:
    world = with_partial_rollout(0, max_staleness=1)
    world.publish(4)
    world.lease()
    assert world.statistic("partial_rollout_tokens_discarded") == 70
    assert world.statistic("partial_rollouts_beyond_spread") == 0


# ── cancelled leases ──


def cancelling(**policy: Any) -> World:
    return World(batch_groups=1, max_staleness=1, cancel_stale_leases=True, **policy)


def test_a_lease_whose_group_can_no_longer_be_fresh_is_cancelled_by_its_next_heartbeat() -> None:
    world = cancelling()
    world.submit("a", "b")
    world.lease(2)
    world.publish(1)
    assert world.extend("a/0/1") == [LeaseState.LIVE], "just fresh enough"
    world.publish(2)
    assert world.extend("a/0/1", "c/0/1") == [LeaseState.CANCELLED, LeaseState.LOST]
    assert world.extend("a/0/1", "b/0/1") == [LeaseState.LOST, LeaseState.CANCELLED]
    assert (world.statistic("leases_cancelled"), world.statistic("leases_returned")) == (2, 0)
    assert world.tasks("pending") == 2


def test_steps_that_are_assembled_and_not_published_count_for_the_heartbeat() -> None:
    world = cancelling()
    world.submit("a")
    world.lease()
    for version in range(2):
        world.queue(1, head=version)
        world.batch(train_version=version)
    assert world.extend("a/0/1") == [LeaseState.CANCELLED]


def test_a_cancelled_task_is_leased_again_at_once_ahead_of_fresh_ones_and_without_a_failure() -> None:
    world = cancelling(max_attempts=1, environments=priorities(code=1))
    world.submit("fresh")
    world.submit("a", environment="code")
    assert world.lease_one().task_id == "a"
    world.publish(2)
    world.extend("a/0/1")
    world.change(environments=())
    assert world.lease_one().lease_id == "a/0/2"


def test_a_lease_is_as_old_as_the_partial_rollout_it_was_given() -> None:
    world = cancelling()
    world.submit("a")
    world.interrupt(world.lease_one().lease_id, partial_rollout=b"so far", head=0, tokens=70)
    world.publish(1)
    assert world.lease_one().partial_rollout == b"so far"
    world.publish(2)
    assert world.extend("a/0/2") == [LeaseState.CANCELLED]
    assert world.statistic("partial_rollout_tokens_discarded") == 70
    assert world.lease_one().partial_rollout == b""


def test_a_lease_that_got_no_partial_rollout_is_as_old_as_its_engine() -> None:
    world = cancelling()
    world.submit("a")
    world.interrupt(world.lease_one().lease_id, partial_rollout=b"so far", head=0, tokens=70)
    world.publish(2)
    assert world.lease_one().partial_rollout == b""
    world.publish(3)
    assert world.extend("a/0/2") == [LeaseState.LIVE]


def test_a_lease_of_an_abandoned_timeline_is_as_old_as_the_fork() -> None:
    world = cancelling()
    world.train(3, head=3)
    world.submit("a")
    grant = world.lease_one()
    world.resume(1, ResumeMode.DISCARD)
    assert world.extend(grant.lease_id) == [LeaseState.LIVE]
    world.publish(2)
    world.publish(3)
    assert world.extend(grant.lease_id) == [LeaseState.CANCELLED]


def test_a_result_of_a_cancelled_lease_still_wins() -> None:
    world = cancelling()
    world.submit("a")
    grant = world.lease_one()
    world.publish(2)
    world.extend(grant.lease_id)
    assert world.push(grant) is ops.PushKind.QUEUED


def test_without_the_policy_stale_leases_live() -> None:
    world = World(batch_groups=1, max_staleness=1)
    world.submit("a")
    world.lease()
    world.publish(5)
    assert world.extend("a/0/1") == [LeaseState.LIVE]
    world.change(cancel_stale_leases=True)
    assert world.extend("a/0/1") == [LeaseState.CANCELLED]


@pytest.mark.parametrize("policy", [{}, {"max_staleness": 1, "staleness_measure": "tail"}])
def test_only_heads_can_be_known_in_advance(policy: dict[str, object]) -> None:
    with pytest.raises(InvalidPolicy, match="cancel_stale_leases"):
        World(cancel_stale_leases=True, **policy)


def test_lease_states_come_in_the_order_of_the_request() -> None:
    world = cancelling()
    world.submit("old")
    world.lease()
    world.publish(2)
    world.submit("new")
    grant = world.lease_one(worker="worker")
    assert dataclasses.astuple(world.model.extend("run", "worker", "process-1", [grant.lease_id, "old/0/1"]))[1] == [
        LeaseState.LIVE,
        LeaseState.CANCELLED,
    ]
