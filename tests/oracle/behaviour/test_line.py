"""The line of blocked pushes: first come, first served, over all callers."""

import pytest

from buffer_service.domain import ops
from buffer_service.domain.ops import PushKind
from buffer_wire.errors import RunPaused, StoreRolledBack
from tests.oracle.behaviour.world import RUN, World
from tests.oracle.rules.proofs import prove

Waiting = tuple[ops.GroupFacts, ops.Pushed]


def full(**policy: int) -> World:
    """One group is queued, and there is no room for another."""
    world = World(batch_groups=1, overflow_action="block", **policy)
    world.queue(1)
    return world


def block(world: World, name: str, *, tokens: int = 10) -> Waiting:
    """A push of its own call that has to wait."""
    made = world.facts(name, tokens=tokens)
    (blocked,) = world.push_facts(made)
    assert blocked.kind is PushKind.BLOCKED
    return made, blocked


def retry(world: World, *waiting: Waiting) -> list[PushKind]:
    """Each tries again, in a call of its own."""
    return [world.retry(*one).kind for one in waiting]


def test_who_came_first_is_served_first_whoever_tries_first() -> None:
    world = full()
    first, second = block(world, "first"), block(world, "second")
    world.batch()
    assert retry(world, second, first, second) == [PushKind.BLOCKED, PushKind.QUEUED, PushKind.BLOCKED]
    world.batch()
    assert retry(world, second) == [PushKind.QUEUED]


def test_a_newcomer_does_not_overtake_the_line_although_there_is_room() -> None:
    world = full()
    first = block(world, "first")
    world.batch()
    newcomer = block(world, "newcomer")
    assert retry(world, first) == [PushKind.QUEUED]
    world.batch()
    assert retry(world, newcomer) == [PushKind.QUEUED]


def test_a_small_group_does_not_overtake_a_large_one() -> None:
    world = full(max_queued_groups=9, max_queued_tokens=100)
    large = block(world, "large", tokens=95)
    small = block(world, "small", tokens=1)
    assert retry(world, small) == [PushKind.BLOCKED]
    world.batch()
    assert retry(world, large, small) == [PushKind.QUEUED, PushKind.QUEUED]


def test_groups_of_one_call_wait_in_their_order() -> None:
    world = full(max_queued_groups=2)
    world.queue(1)
    facts = [world.facts(name) for name in ("a", "b", "c")]
    blocked = world.push_facts(*facts)
    world.batch()
    tried = list(zip(facts, [one.payload_key for one in blocked], strict=True))
    again = world.do(world.model.retry_push, tried).outcomes
    assert [one.kind for one in again] == [PushKind.QUEUED, PushKind.BLOCKED, PushKind.BLOCKED]


def test_a_head_that_lapses_lets_the_next_one_pass_and_goes_to_the_end() -> None:
    world = full()
    gone, second, third = block(world, "gone"), block(world, "second"), block(world, "third")
    world.batch()
    world.now += 3_000
    assert retry(world, second) == [PushKind.BLOCKED], "the head may still come"
    world.now += 1
    assert retry(world, second, gone, third) == [PushKind.QUEUED, PushKind.BLOCKED, PushKind.BLOCKED]
    world.batch()
    assert retry(world, gone) == [PushKind.QUEUED], "third had lapsed and came again behind it"


def test_every_try_keeps_the_place() -> None:
    world = full()
    first, second = block(world, "first"), block(world, "second")
    for _ in range(3):
        world.now += 2_900
        assert retry(world, first) == [PushKind.BLOCKED]
    world.batch()
    assert retry(world, second, first) == [PushKind.BLOCKED, PushKind.QUEUED]


def test_lapsed_waiters_behind_the_head_keep_their_places() -> None:
    world = full()
    first, second, third = block(world, "first"), block(world, "second"), block(world, "third")
    world.now += 2_900
    retry(world, first)
    world.now += 2_900
    world.batch()
    assert retry(world, third, second) == [PushKind.BLOCKED, PushKind.BLOCKED]
    assert retry(world, first) == [PushKind.QUEUED]
    world.batch()
    assert retry(world, third, second) == [PushKind.BLOCKED, PushKind.QUEUED]


def test_whoever_gives_up_leaves_the_line() -> None:
    world = full()
    first, second = block(world, "first"), block(world, "second")
    world.do(world.model.abandon_push, [first[1].payload_key])
    world.batch()
    assert retry(world, second) == [PushKind.QUEUED]


def test_whoever_is_answered_otherwise_leaves_the_line() -> None:
    world = full()
    first, twin, second = block(world, "same"), block(world, "same"), block(world, "second")
    world.batch()
    assert retry(world, first) == [PushKind.QUEUED]
    world.batch()
    assert retry(world, second) == [PushKind.BLOCKED]
    assert retry(world, twin, second) == [PushKind.DUPLICATE, PushKind.QUEUED]


def test_duplicates_are_answered_without_waiting_in_line() -> None:
    world = World(batch_groups=1, overflow_action="block")
    world.push("own")
    block(world, "first")
    assert world.push("own") is PushKind.DUPLICATE


def test_other_actions_do_not_look_at_the_line() -> None:
    world = full()
    first = block(world, "first")
    world.batch()
    world.change(overflow_action="reject")
    assert world.push("newcomer") is PushKind.QUEUED
    assert retry(world, first) == [PushKind.REJECTED_FULL]
    world.change(overflow_action="block")
    world.batch()
    assert world.push("another") is PushKind.QUEUED, "the line is empty"


def test_a_ticket_and_a_prolonged_lease_raise_the_revision_and_waiting_does_not() -> None:
    world = full()
    before = world.view.revision
    leaseless = block(world, "a")
    assert world.view.revision == before + 1
    retry(world, leaseless)
    assert world.view.revision == before + 1
    world.submit("b")
    grant = world.lease_one()
    facts = world.facts(grant)
    (blocked,) = world.push_facts(facts)
    before = world.view.revision
    retry(world, (facts, blocked))
    assert world.view.revision == before + 1


def test_a_retry_that_a_rolled_back_store_refuses_leaves_the_line() -> None:
    world = full()
    first = block(world, "first")
    with pytest.raises(StoreRolledBack):
        world.model.extend(RUN, "worker", "process-1", [], seen_revision=prove("", 1_000))
    with pytest.raises(RunPaused):
        world.retry(*first)
    world.resume()
    world.batch()
    assert world.push("newcomer") is PushKind.QUEUED
