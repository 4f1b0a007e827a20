"""Tests of the order in which groups enter batches and tasks are leased."""

import pytest

from buffer_service.domain import ops
from tests.oracle.behaviour.world import World, priorities


def push_in(world: World, environment: str, *names: str, **facts: int) -> None:
    for name in names:
        assert world.push(name, environment=environment, **facts) is ops.PushKind.QUEUED


def push_leased(world: World, name: str, *, priority: int = 0, environment: str = "math") -> None:
    """A group of a submitted task, so that it has a priority."""
    world.submit(name, priority=priority, environment=environment)
    (grant,) = world.lease().grants
    assert grant.task_id == name
    world.push(grant, environment=environment)


def drawn(world: World, count: int) -> list[str]:
    """Return what single-group batches draw, one after another."""
    return [world.names(train_version=100)[0].removesuffix("/0") for _ in range(count)]


def with_heads(order: str, **policy: object) -> World:
    world = World(batch_groups=1, max_queued_groups=9, order=order, **policy)
    for name, head, tail, mean in (("a", 5, 9, 5_900), ("b", 3, 8, 7_000), ("c", 4, 7, 6_000), ("d", 3, 7, 6_000)):
        world.push(name, head=head, tail=tail, mean_milli=mean)
    return world


@pytest.mark.parametrize(
    ("order", "measure", "expected"),
    [
        ("fifo", "head", "abcd"),
        ("lifo", "head", "dcba"),
        ("stalest_first", "head", "bdca"),
        ("stalest_first", "tail", "cdba"),
        ("stalest_first", "mean", "acdb"),
        ("priority", "head", "abcd"),
    ],
)
def test_orders(order: str, measure: str, expected: str) -> None:
    assert "".join(drawn(with_heads(order, staleness_measure=measure), 4)) == expected


def test_a_whole_batch_is_drawn_in_that_order_and_sharded_by_sequence() -> None:
    world = with_heads("lifo")
    world.change(batch_groups=2)
    assert world.names() == ["c/0", "d/0"]
    assert world.names() == ["a/0", "b/0"]


def test_the_order_may_be_switched_while_groups_are_queued() -> None:
    world = with_heads("fifo")
    assert drawn(world, 1) == ["a"]
    world.change(order="lifo")
    assert drawn(world, 1) == ["d"]
    world.change(order="stalest_first")
    assert drawn(world, 2) == ["b", "c"]


def test_higher_priority_enters_first_and_equals_in_order_of_arrival() -> None:
    world = World(batch_groups=1, max_queued_groups=9, order="priority")
    push_leased(world, "low")
    push_leased(world, "high", priority=7)
    push_leased(world, "high-2", priority=7)
    world.push("leaseless")
    assert drawn(world, 4) == ["high", "high-2", "low", "leaseless"]


def test_the_priority_of_an_environment_replaces_that_of_its_groups_which_then_decides_among_them() -> None:
    world = World(batch_groups=1, max_queued_groups=9, order="priority", environments=priorities(code=5))
    push_leased(world, "math-4", priority=4)
    push_leased(world, "code-1", priority=1, environment="code")
    push_leased(world, "math-5", priority=5)
    push_leased(world, "code-9", priority=9, environment="code")
    push_leased(world, "math-6", priority=6)
    assert drawn(world, 5) == ["math-6", "code-9", "math-5", "code-1", "math-4"]


def test_priorities_of_environments_change_live() -> None:
    world = World(batch_groups=1, max_queued_groups=9, order="priority", environments=priorities(code=5))
    push_in(world, "math", "m1", "m2")
    push_in(world, "code", "c1", "c2")
    assert drawn(world, 1) == ["c1"]
    world.change(environments=priorities(math=200))
    assert drawn(world, 3) == ["m1", "m2", "c2"]


@pytest.mark.parametrize("order", ["lifo", "stalest_first", "priority"])
def test_overflow_drops_the_oldest_whatever_the_order(order: str) -> None:
    world = World(batch_groups=1, max_queued_groups=2, order=order)
    push_leased(world, "oldest", priority=9)
    push_in(world, "math", "b", head=3)
    push_in(world, "code", "c", head=1)
    assert sorted(drawn(world, 2)) == ["b", "c"]


@pytest.mark.parametrize("order", ["fifo", "lifo", "stalest_first", "priority"])
def test_a_requeued_group_has_its_old_place(order: str) -> None:
    world = with_heads(order)
    before = drawn(world, 4)
    world.resume(0, ops.ResumeMode.REQUEUE)
    expected = ["a", "b", "c", "d"] if order == "stalest_first" else before
    assert drawn(world, 4) == expected, "the resume made all heads equal"


def test_tasks_are_leased_by_the_priority_of_their_environment_then_their_own() -> None:
    world = World(environments=priorities(code=5))
    world.submit("math-6", priority=6)
    world.submit("code-0", environment="code")
    world.submit("code-9", priority=9, environment="code")
    world.submit("math-5", priority=5)
    assert [grant.task_id for grant in world.lease(9).grants] == ["math-6", "code-9", "math-5", "code-0"]


def test_priorities_of_environments_change_for_tasks_that_are_pending() -> None:
    world = World()
    world.submit("m1", "m2")
    world.submit("c1", "c2", environment="code")
    assert world.lease_one().task_id == "m1"
    world.change(environments=priorities(code=1))
    assert [grant.task_id for grant in world.lease(9).grants] == ["c1", "c2", "m2"]


def test_a_task_that_came_back_goes_ahead_of_fresh_ones_of_another_environment_with_its_priority() -> None:
    world = World()
    world.submit("back", environment="code")
    lease_id = world.lease_one().lease_id
    world.submit("fresh")
    world.interrupt(lease_id)
    assert [grant.task_id for grant in world.lease(2).grants] == ["back", "fresh"]
