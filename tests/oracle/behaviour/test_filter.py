"""Groups that the filter ends as they come."""

from buffer_service.domain.ops import LeaseState, PushKind
from tests.oracle.behaviour.world import RUN, World


def filtering(**policy: object) -> World:
    return World(batch_groups=1, filter_equal_rewards=True, **policy)


def test_a_filtered_group_is_accepted_and_ended() -> None:
    world = filtering()
    world.submit("a")
    grant = world.lease_one()
    assert world.push(grant, equal_rewards=True) is PushKind.FILTERED
    assert (world.groups("accepted"), world.groups("filtered"), world.groups("queued")) == (1, 1, 0)
    assert world.tasks("completed") == 1
    assert world.extend(grant.lease_id) == [LeaseState.LOST]
    assert world.model.stored_bodies(RUN) == 0
    assert world.statistic("filtered_equal_rewards") == 1


def test_its_capacity_is_free_at_once() -> None:
    world = filtering(max_inflight_groups=1, reserve_queue_space=True, max_lookahead=0)
    world.submit("a", "b")
    world.push(world.lease_one(), equal_rewards=True)
    assert world.lease_one().task_id == "b"


def test_the_same_attempt_again_is_a_duplicate_until_the_next_checkpoint() -> None:
    world = filtering()
    world.submit("a")
    grant = world.lease_one()
    world.push(grant, equal_rewards=True)
    assert world.push(grant) is PushKind.DUPLICATE
    assert world.push("a") is PushKind.CLOSED
    world.train()
    world.checkpoint(0)
    assert world.push(grant) is PushKind.UNKNOWN_LEASE


def test_a_group_without_a_lease_is_filtered_too() -> None:
    world = filtering()
    assert world.push("own", equal_rewards=True) is PushKind.FILTERED
    assert world.push("own", equal_rewards=True) is PushKind.DUPLICATE
    assert world.tasks("submitted") == world.tasks("completed") == 1


def test_the_partial_rollout_goes_with_it() -> None:
    world = filtering()
    world.submit("a")
    world.interrupt(world.lease_one().lease_id, partial_rollout=b"so far")
    world.push(world.lease_one(), equal_rewards=True)
    assert world.model.stored_bodies(RUN) == 0


def test_it_needs_no_room_and_waits_for_none() -> None:
    world = filtering(overflow_action="block")
    world.queue(1)
    kinds = [pushed.kind for pushed in world.push_facts(world.facts("a"), world.facts("b", equal_rewards=True))]
    assert kinds == [PushKind.BLOCKED, PushKind.FILTERED]
    world.change(overflow_action="reject")
    assert world.push("c", equal_rewards=True) is PushKind.FILTERED
    world.change(overflow_action="drop_oldest")
    assert world.push("d", equal_rewards=True) is PushKind.FILTERED
    assert world.groups("dropped_overflow") == 0


def test_a_blocked_group_is_filtered_when_the_policy_changes_meanwhile() -> None:
    world = World(batch_groups=1, overflow_action="block")
    world.queue(1)
    facts = world.facts("a", response_tokens=(5, 90))
    (blocked,) = world.push_facts(facts)
    world.change(filter_max_response_tokens=50)
    assert world.retry(facts, blocked).kind is PushKind.FILTERED
    assert world.model.fetch(RUN, [blocked.payload_key]) == [None]
    assert world.statistic("filtered_response_tokens") == 1


def test_what_is_not_acceptable_is_not_filtered() -> None:
    world = filtering(max_attempts=1)
    world.submit("a")
    grant = world.lease_one()
    world.fail(grant.lease_id)
    assert world.push(grant, equal_rewards=True) is PushKind.CLOSED
    assert world.groups("accepted") == 0


def test_acceptance_follows_what_is_queued_and_filtered() -> None:
    world = filtering(max_queued_groups=9)
    world.push("a", equal_rewards=True)
    assert world.statistic("recent_acceptance_ppm") == 984_375
    world.push("b")
    assert world.statistic("recent_acceptance_ppm") == 984_619
    world.push("b")
    assert world.statistic("recent_acceptance_ppm") == 984_619, "a duplicate says nothing"


def test_without_a_filter_acceptance_stands_still() -> None:
    world = filtering(max_queued_groups=9)
    world.push("a", equal_rewards=True)
    world.change(filter_equal_rewards=False)
    world.queue(3)
    assert world.statistic("recent_acceptance_ppm") == 984_375


def test_each_filter_has_its_counter() -> None:
    world = World(filter_min_response_tokens=5, filter_max_mean_reward_milli=900)
    world.push("short", response_tokens=(4, 6))
    world.push("solved", mean_reward_milli=1_000)
    assert world.groups("filtered") == 2
    assert (world.statistic("filtered_response_tokens"), world.statistic("filtered_mean_reward")) == (1, 1)
