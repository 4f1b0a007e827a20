"""Streamed steps when a trainer resumes."""

import pytest

from buffer_service.domain.ops import ResumeMode
from buffer_wire.errors import InvalidField
from tests.oracle.behaviour.world import World


def halfway(**policy: object) -> World:
    """Step 0 is complete and committed, two of the three micro-batches of step 1 are closed."""
    world = World(**{"batch_groups": 3, "micro_batch_groups": 1, "max_queued_groups": 9, **policy})
    for micro_batch in range(3):
        world.queue(1, head=micro_batch)
        world.batch(0, micro_batch=micro_batch)
    world.publish(1, commit=0)
    for micro_batch in range(2):
        world.queue(1, head=1)
        world.batch(1, micro_batch=micro_batch)
    return world


def shards(world: World, step: int, micro_batches: int) -> list[list[str]]:
    return [world.names(step, micro_batch=micro_batch) for micro_batch in range(micro_batches)]


@pytest.mark.parametrize("next_step", [None, 1, 0])
def test_replay_keeps_the_closed_micro_batches_of_the_open_step(next_step: int | None) -> None:
    world = halfway()
    stored = shards(world, 0, 3), shards(world, 1, 2)
    resumed = world.resume(next_step)
    assert resumed.next_unassembled_step == 1, "the open step is not assembled"
    assert (shards(world, 0, 3), shards(world, 1, 2)) == stored
    assert world.groups("forming") == 2
    world.queue(1)
    assert world.batch(1, micro_batch=2).final
    world.commit(1)
    assert world.groups("trained") == 6


def test_the_heads_of_kept_micro_batches_are_those_of_the_fork() -> None:
    world = halfway()
    world.resume(0)
    assert [
        group.head_version for micro_batch in range(2) for group in world.batch(1, micro_batch=micro_batch).shard
    ] == [0, 0]
    assert world.batch(1, micro_batch=0).train_version == 1, "that of the first micro-batch, also in the new timeline"


def test_a_kept_open_step_asks_for_no_version_that_the_new_timeline_has_not_reached() -> None:
    world = World(batch_groups=2, micro_batch_groups=1, max_queued_groups=9, max_staleness=0, batches_per_publish=2)
    for step in range(2):
        for micro_batch in range(2):
            world.queue(1)
            world.batch(step, micro_batch=micro_batch)
    world.publish(1, commit=1)
    world.queue(1, head=1)
    assert world.batch(2).train_version == 1
    assert world.resume(1).version == 0
    assert world.batch(2).train_version == 0, "steps 1 and 2 are trained before version 1 is published again"
    world.queue(1, head=0)
    assert world.batch(2, micro_batch=1).final


@pytest.mark.parametrize(("next_step", "queued"), [(1, 2), (0, 5)])
def test_requeue_takes_the_open_step_apart(next_step: int, queued: int) -> None:
    world = halfway()
    names = [name for part in shards(world, 1, 2) for name in part]
    resumed = world.resume(next_step, ResumeMode.REQUEUE)
    assert resumed.next_unassembled_step == next_step
    assert (world.groups("queued"), world.groups("forming")) == (queued, 0)
    if next_step == 1:
        assert [world.names(1, micro_batch=micro_batch)[0] for micro_batch in range(2)] == names


def test_discard_forgets_the_open_step() -> None:
    world = halfway()
    world.resume(1, ResumeMode.DISCARD)
    assert (world.groups("discarded"), world.groups("forming"), world.groups("trained")) == (2, 0, 3)
    world.queue(1)
    assert world.batch(1, micro_batch=0).total_groups == 1


def test_requeued_micro_batches_free_lookahead() -> None:
    world = halfway(max_lookahead=0)
    world.submit("a", "b", "c")
    assert len(world.lease(3).grants) == 1, "of six groups up to version 1, five are assembled"
    world.resume(1, ResumeMode.DISCARD)
    assert len(world.lease(3).grants) == 2


def test_a_closed_micro_batch_is_split_again_for_another_number_of_ranks() -> None:
    world = halfway()
    stored = shards(world, 1, 2)
    world.resume()
    again = [
        world.names(1, rank=rank, micro_batch=micro_batch, world_size=2)
        for micro_batch in range(2)
        for rank in range(2)
    ]
    assert [part for part in again if part] == stored
    world.queue(1)
    assert world.batch(1, micro_batch=2, world_size=2).total_groups == 3


def test_ranks_that_cannot_have_equal_numbers_are_refused_in_the_middle_of_a_step() -> None:
    world = halfway(equal_shards=True)
    world.resume()
    world.queue(1)
    with pytest.raises(InvalidField, match="a divisor of batch_groups 3"):
        world.pull(1, micro_batch=2, world_size=2)
    world.resume(1, ResumeMode.REQUEUE)
    assert world.batch(1, world_size=3).final


def test_freed_replay_data_requeues_the_open_step_too() -> None:
    world = halfway()
    world.checkpoint(0)
    world.resume(0, allow_regenerate=True)
    assert (world.groups("queued"), world.groups("forming"), world.view.next_step) == (2, 0, 0)
