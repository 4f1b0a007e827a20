"""Trained steps are retained for replays within bounds on steps and on payload bytes."""

import pytest

from buffer_service.domain.ops import ResumeMode
from buffer_wire.errors import ReplayGap
from tests.oracle.behaviour.world import RUN, World


def retained(world: World) -> range:
    return range(world.view.checkpointed_steps, world.view.committed_steps)


def test_the_oldest_steps_go_when_trained_payloads_exceed_the_bound() -> None:
    world = World(batch_groups=2, max_retained_bytes=600)
    world.train(3)
    assert retained(world) == range(3), "600 bytes are within it"
    world.train(1)
    assert retained(world) == range(1, 4)
    with pytest.raises(ReplayGap):
        world.pull(0)
    assert world.model.stored_bodies(RUN) == 6


def test_as_many_steps_go_as_one_large_one_needs() -> None:
    world = World(batch_groups=1, max_retained_bytes=500)
    world.train(4)
    world.train(1, size_bytes=250)
    assert retained(world) == range(2, 5)


def test_a_step_that_is_too_large_on_its_own_is_not_retained_at_all() -> None:
    world = World(batch_groups=1, max_retained_bytes=500)
    world.train(2)
    world.train(1, size_bytes=501)
    assert (world.view.checkpointed_steps, world.view.committed_steps) == (3, 3)
    assert world.model.stored_bodies(RUN) == 0
    world.train(1)
    assert retained(world) == range(3, 4)


def test_the_tighter_of_both_bounds_holds() -> None:
    world = World(batch_groups=1, max_retained_bytes=500, retained_steps=3)
    world.train(4)
    assert len(retained(world)) == 3
    world.change(retained_steps=64, max_retained_bytes=200)
    world.train(1)
    assert len(retained(world)) == 2


def test_delivered_steps_are_not_counted() -> None:
    world = World(batch_groups=1, max_queued_groups=9, max_retained_bytes=200)
    world.queue(5)
    for _ in range(5):
        world.batch()
    world.commit(1)
    assert len(retained(world)) == 2
    world.commit(2)
    assert len(retained(world)) == 2


def test_bytes_of_lost_groups_are_not_counted() -> None:
    world = World(batch_groups=2, max_retained_bytes=300)
    for step in range(2):
        lost = world.queue(2)[0]
        world.batch()
        world.lose(step, *([lost] if step == 0 else []))
    world.commit(1)
    assert len(retained(world)) == 2


@pytest.mark.parametrize("mode", list(ResumeMode))
def test_steps_that_a_resume_takes_back_are_counted_again_when_they_are_trained_again(mode: ResumeMode) -> None:
    world = World(batch_groups=1, max_queued_groups=9, max_retained_bytes=300)
    world.train(3)
    world.resume(1, mode)
    if mode is not ResumeMode.REPLAY:
        world.queue(2)
        world.batch()
        world.batch()
    world.commit(2)
    assert len(retained(world)) == 3
    world.train(1)
    assert len(retained(world)) == 3


def test_a_checkpoint_makes_room() -> None:
    world = World(batch_groups=1, max_retained_bytes=300)
    world.train(3)
    world.checkpoint(1)
    world.train(2)
    assert retained(world) == range(2, 5)


def test_a_repeated_commit_frees_nothing_when_the_bound_was_lowered_meanwhile() -> None:
    world = World(batch_groups=1)
    world.train(3)
    world.change(max_retained_bytes=100)
    before = world.view
    world.commit(2)
    assert world.view == before
