"""Quotas bound what is queued, forming and delivered; caps only what is queued."""

from typing import Any

import pytest

from buffer_service.domain.ops import PushKind, ResumeMode
from tests.oracle.behaviour.world import World

MIB = 1 << 20


def held(world: World, batches: int = 1) -> None:
    """Deliver batches that nobody commits."""
    for _ in range(batches):
        world.queue(1)
        world.batch()


@pytest.mark.parametrize(
    ("policy", "size"),
    [
        ({"quota_groups": 2}, {}),
        ({"max_queued_tokens": 100, "quota_tokens": 200}, {"tokens": 100}),
        ({"max_queued_bytes": MIB, "quota_bytes": 2 * MIB}, {"size_bytes": MIB}),
    ],
)
@pytest.mark.parametrize("action", ["reject", "drop_oldest", "block"])
def test_delivered_groups_count_until_they_are_trained(
    policy: dict[str, Any], size: dict[str, int], action: str
) -> None:
    world = World(batch_groups=1, prefetch_batches=0, overflow_action=action, **policy)
    for name in ("a", "b"):
        world.push(name, **size)
        world.batch()
    expected = PushKind.BLOCKED if action == "block" else PushKind.REJECTED_FULL
    assert world.push("c", **size) is expected
    world.commit(0)
    world.change(overflow_action="reject")
    assert world.push("c", **size) is PushKind.QUEUED


def test_forming_groups_count() -> None:
    world = World(batch_groups=2, micro_batch_groups=1, quota_groups=4, overflow_action="reject", max_queued_groups=9)
    for step, micro_batch in ((0, 0), (0, 1), (1, 0)):
        world.queue(1)
        world.batch(step, micro_batch=micro_batch)
    assert (world.groups("delivered"), world.groups("forming")) == (2, 1)
    world.queue(1)
    assert world.push("one too many") is PushKind.REJECTED_FULL


def test_drop_oldest_drops_the_whole_queue_before_it_gives_up() -> None:
    world = World(batch_groups=1, max_queued_groups=9, max_queued_tokens=100, quota_tokens=200)
    for name in ("a", "b"):
        world.push(name, tokens=90)
        world.batch()
    world.queue(2, tokens=10)
    assert world.push("large", tokens=30) is PushKind.REJECTED_FULL
    assert (world.groups("dropped_overflow"), world.groups("queued")) == (2, 0)
    assert world.push("small", tokens=20) is PushKind.QUEUED
    assert world.statistic("pushes_rejected") == 1


def test_a_rejected_push_without_a_lease_makes_no_task() -> None:
    world = World(batch_groups=1, quota_groups=2)
    held(world, 2)
    before = world.tasks("submitted")
    assert world.push("own") is PushKind.REJECTED_FULL
    assert world.tasks("submitted") == before


def test_trained_dropped_and_filtered_groups_are_not_counted() -> None:
    world = World(batch_groups=1, quota_groups=2, filter_equal_rewards=True, overflow_action="reject")
    world.train(3)
    for name in "abc":
        assert world.push(name, equal_rewards=True) is PushKind.FILTERED
    assert world.push("d") is PushKind.QUEUED


def test_a_replay_may_exceed_a_quota_and_pushes_wait_until_it_is_trained_again() -> None:
    world = World(batch_groups=1, quota_groups=2, overflow_action="reject")
    world.train(3)
    world.resume(0)
    assert world.groups("delivered") == 3
    assert world.push("a") is PushKind.REJECTED_FULL
    world.commit(1)
    assert world.push("a") is PushKind.QUEUED


def test_a_requeue_drops_for_the_caps_alone() -> None:
    world = World(batch_groups=1, max_queued_groups=9, quota_groups=2)
    world.train(4)
    world.resume(0, ResumeMode.REQUEUE)
    assert (world.groups("queued"), world.groups("dropped_overflow")) == (4, 0)


def test_a_quota_that_was_lowered_refuses_the_next_push() -> None:
    world = World(batch_groups=1, max_queued_groups=9, overflow_action="reject")
    world.queue(5)
    world.change(quota_groups=2)
    assert world.push("a") is PushKind.REJECTED_FULL
    assert world.groups("queued") == 5
