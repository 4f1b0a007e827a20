import dataclasses

import pytest

from buffer_service.domain import ops
from buffer_service.domain.ops import LeaseState, PushKind, ReturnOutcome
from tests.oracle.behaviour.world import RUN, World

MIB = 1 << 20


def leased(world: World, *names: str) -> list[ops.LeaseGrant]:
    world.submit(*names)
    return list(world.lease(len(names)).grants)


def test_an_accepted_group_completes_its_task_and_ends_the_lease() -> None:
    world = World()
    (grant,) = leased(world, "a")
    assert world.push(grant) is PushKind.QUEUED
    assert (world.tasks("completed"), world.tasks("leased")) == (1, 0)
    assert world.groups("accepted") == world.groups("queued") == 1
    assert world.extend(grant.lease_id) == [LeaseState.LOST]


def test_a_repeated_push_is_a_duplicate_and_changes_no_ledger() -> None:
    world = World()
    (grant,) = leased(world, "a")
    world.push(grant)
    before = world.view
    assert world.push(grant) is PushKind.DUPLICATE
    assert (world.view.groups, world.view.tasks) == (before.groups, before.tasks)
    assert world.statistic("pushes_duplicate") == 1


def test_a_result_wins_after_its_lease_expired_and_ends_the_next_attempt() -> None:
    world = World(lease_ttl_ms=1_000, retry_backoff_ms=0)
    (late,) = leased(world, "a")
    world.now += 1_001
    current = world.lease_one(worker="other")
    assert current.lease_id == "a/0/2"
    assert world.push(late) is PushKind.QUEUED
    assert world.extend(current.lease_id, worker="other") == [LeaseState.LOST]
    assert world.push(current) is PushKind.CLOSED
    assert world.push(late) is PushKind.DUPLICATE


def test_a_result_wins_over_a_task_that_backs_off() -> None:
    world = World()
    (grant,) = leased(world, "a")
    world.fail(grant.lease_id)
    assert world.push(grant) is PushKind.QUEUED
    assert world.tasks("pending") == 0


def test_a_result_for_a_failed_task_is_closed() -> None:
    world = World(max_attempts=1)
    (grant,) = leased(world, "a")
    assert world.fail(grant.lease_id) is ReturnOutcome.FAILED
    assert world.push(grant) is PushKind.CLOSED
    assert world.statistic("pushes_closed") == 1


def test_a_result_of_an_earlier_incarnation_is_closed() -> None:
    world = World(batch_groups=1, max_staleness=0, stale_action="recycle")
    (grant,) = leased(world, "a")
    world.push(grant)
    world.pull(train_version=1)
    assert world.push(grant) is PushKind.CLOSED


@pytest.mark.parametrize(("incarnation", "attempt"), [(0, 2), (1, 1)])
def test_a_lease_that_was_never_given_out_is_unknown(incarnation: int, attempt: int) -> None:
    world = World()
    (grant,) = leased(world, "a")
    forged = dataclasses.replace(grant, lease_id=f"a/{incarnation}/{attempt}", incarnation=incarnation, attempt=attempt)
    before = world.view
    assert world.push(forged) is PushKind.UNKNOWN_LEASE
    assert world.view == before


def test_a_lease_of_no_task_is_unknown() -> None:
    world = World()
    assert world.push(ops.LeaseGrant("a/0/1", "a", 0, 1, b"", b"")) is PushKind.UNKNOWN_LEASE


@pytest.mark.parametrize("lease_id", ["malformed", "b/0/1", "a/1/1", "a/0/x"])
def test_a_lease_of_another_group_is_invalid(lease_id: str) -> None:
    world = World()
    (grant,) = leased(world, "a")
    facts = dataclasses.replace(world.facts(grant), lease_id=lease_id)
    (pushed,) = world.push_facts(facts)
    assert (pushed.kind, pushed.field, pushed.value) == (PushKind.INVALID, "lease_id", lease_id)


def test_a_push_without_a_lease_makes_a_task_once() -> None:
    world = World()
    assert world.push("own") is PushKind.QUEUED
    assert world.tasks("submitted") == world.tasks("completed") == 1
    assert world.push("own") is PushKind.DUPLICATE
    (pushed,) = world.push_facts(world.facts("other", incarnation=1))
    assert (pushed.kind, pushed.field) == (PushKind.INVALID, "incarnation")


def test_a_push_without_a_lease_completes_an_open_task_and_repeats_as_a_duplicate() -> None:
    world = World()
    (grant,) = leased(world, "a")
    assert world.push("a") is PushKind.QUEUED
    assert world.push("a") is PushKind.DUPLICATE
    assert world.push(grant) is PushKind.CLOSED
    assert world.tasks("submitted") == 1


def test_a_push_without_a_lease_for_a_task_with_another_result_is_closed() -> None:
    world = World()
    (grant,) = leased(world, "a")
    world.push(grant)
    assert world.push("a") is PushKind.CLOSED


# ── caps ──


def test_a_group_above_a_cap_on_its_own_is_invalid_whatever_the_queue_holds() -> None:
    world = World(batch_groups=1, max_queued_tokens=100, max_queued_bytes=MIB)
    for facts, field, value in (
        (world.facts("a", size_bytes=MIB + 1), "payload", MIB + 1),
        (world.facts("a", tokens=101), "tokens", 101),
    ):
        (pushed,) = world.push_facts(facts)
        assert (pushed.kind, pushed.field, pushed.value) == (PushKind.INVALID, field, str(value))
    assert world.tasks("submitted") == 0


def test_drop_oldest_makes_room_from_the_front() -> None:
    world = World(batch_groups=2)
    world.queue(1)
    kept = world.queue(2)
    assert world.groups("dropped_overflow") == 1
    assert world.names() == kept


@pytest.mark.parametrize(
    ("cap", "size"),
    [({"max_queued_tokens": 100}, {"tokens": 40}), ({"max_queued_bytes": MIB}, {"size_bytes": 400_000})],
)
def test_drop_oldest_drops_as_many_as_the_new_group_needs(cap: dict[str, int], size: dict[str, int]) -> None:
    world = World(batch_groups=1, max_queued_groups=9, **cap)
    world.queue(2, **size)
    large = {name: value * 2 for name, value in size.items()}
    world.queue(1, **large)
    assert (world.groups("queued"), world.groups("dropped_overflow")) == (1, 2)


def test_reject_leaves_task_and_lease_as_they_are() -> None:
    world = World(batch_groups=1, overflow_action="reject", lease_ttl_ms=1_000)
    world.queue(1)
    (grant,) = leased(world, "a")
    world.now += 1_000
    assert world.push(grant) is PushKind.REJECTED_FULL
    assert world.extend(grant.lease_id) == [LeaseState.LIVE]
    assert (world.tasks("leased"), world.statistic("pushes_rejected")) == (1, 1)


def test_a_rejected_group_does_not_keep_a_smaller_one_out() -> None:
    world = World(batch_groups=1, max_queued_groups=9, max_queued_tokens=100, overflow_action="reject")
    world.queue(1, tokens=50)
    kinds = [pushed.kind for pushed in world.push_facts(world.facts("a", tokens=60), world.facts("b", tokens=50))]
    assert kinds == [PushKind.REJECTED_FULL, PushKind.QUEUED]


def test_block_keeps_the_lease_alive_and_the_task_open() -> None:
    world = World(batch_groups=1, overflow_action="block", lease_ttl_ms=1_000)
    world.queue(1)
    (grant,) = leased(world, "a")
    world.now += 900
    (pushed,) = world.push_facts(world.facts(grant))
    assert pushed.kind is PushKind.BLOCKED
    world.now += 900
    assert world.extend(grant.lease_id) == [LeaseState.LIVE]
    assert world.model.fetch(RUN, [pushed.payload_key]) == [b"a/a/0/1"]


def test_a_blocked_late_result_does_not_keep_the_next_attempt_alive() -> None:
    world = World(batch_groups=1, overflow_action="block", lease_ttl_ms=1_000, retry_backoff_ms=0)
    world.queue(1)
    (late,) = leased(world, "a")
    world.now += 1_001
    world.lease(worker="other")
    world.now += 900
    assert world.push(late) is PushKind.BLOCKED
    world.now += 900
    assert world.extend("a/0/2", worker="other") == [LeaseState.LOST]


def test_nothing_overtakes_a_blocked_group_within_its_call() -> None:
    world = World(batch_groups=1, max_queued_groups=9, max_queued_tokens=100, overflow_action="block")
    world.queue(1, tokens=50)
    first, second = leased(world, "a", "b")
    world.push("own", tokens=10)
    facts = [world.facts(first, tokens=60), world.facts(second, tokens=5), world.facts("own")]
    assert [pushed.kind for pushed in world.push_facts(*facts)] == [
        PushKind.BLOCKED,
        PushKind.BLOCKED,
        PushKind.DUPLICATE,
    ]


def test_a_blocked_group_is_queued_when_there_is_space() -> None:
    world = World(batch_groups=1, overflow_action="block")
    world.queue(1)
    (grant,) = leased(world, "a")
    facts = world.facts(grant)
    (blocked,) = world.push_facts(facts)
    retry = [(facts, blocked.payload_key)]
    assert world.do(world.model.retry_push, retry).outcomes[0].kind is PushKind.BLOCKED
    world.batch()
    assert world.do(world.model.retry_push, retry).outcomes[0].kind is PushKind.QUEUED
    (delivered,) = world.batch().shard
    assert world.model.fetch(RUN, [delivered.payload_key]) == [b"a/a/0/1"]


def test_an_abandoned_push_leaves_nothing_behind() -> None:
    world = World(batch_groups=1, overflow_action="block")
    world.queue(1)
    (blocked,) = world.push_facts(world.facts("late"))
    world.do(world.model.abandon_push, [blocked.payload_key])
    assert world.model.fetch(RUN, [blocked.payload_key]) == [None]
    assert world.tasks("submitted") == 1


@pytest.mark.parametrize("ending", ["duplicate", "dropped", "checkpointed"])
def test_payloads_of_groups_that_ended_are_gone(ending: str) -> None:
    world = World(batch_groups=1)
    (grant,) = leased(world, "a")
    world.push(grant)
    if ending == "duplicate":
        world.push(grant)
        assert world.model.stored_bodies(RUN) == 1
        return
    if ending == "dropped":
        world.queue(1)
    else:
        world.batch()
        world.commit(0)
        assert world.model.stored_bodies(RUN) == 1
        world.checkpoint(0)
        assert world.model.stored_bodies(RUN) == 0
        return
    assert world.model.stored_bodies(RUN) == 1


def test_caps_that_were_lowered_hold_after_the_next_push() -> None:
    world = World(batch_groups=1, max_queued_groups=5)
    world.queue(5)
    policy = dataclasses.replace(world.view.policy, max_queued_groups=2)
    world.do(world.model.update_policy, policy)
    assert world.groups("queued") == 5
    world.queue(1)
    assert (world.groups("queued"), world.groups("dropped_overflow")) == (2, 4)
