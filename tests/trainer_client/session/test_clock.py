"""Tests of which version a pulled step is for: the published one, and the publishes still to come before it."""

import pytest

from trainer_client.session.clock import TrainClock

pytestmark = pytest.mark.matrix


def test_a_step_pulled_when_its_turn_has_come_is_for_the_published_version() -> None:
    clock = TrainClock(version=4, next_step=10, batches_per_publish=1)
    for step in range(10, 14):
        assert clock.train_version(step) == clock.version == 4 + step - 10
        clock.hand_out(step)
        clock.published(clock.version + 1)


def test_steps_ahead_count_the_publishes_that_come_before_them() -> None:
    clock = TrainClock(version=4, next_step=10, batches_per_publish=1)
    assert [clock.train_version(step) for step in (10, 11, 12)] == [4, 5, 6]
    clock.hand_out(10)
    assert [clock.train_version(step) for step in (11, 12)] == [5, 6]
    clock.published(5)
    assert [clock.train_version(step) for step in (11, 12)] == [5, 6]


def test_several_batches_share_a_publish() -> None:
    clock = TrainClock(version=0, next_step=0, batches_per_publish=2)
    assert [clock.train_version(step) for step in range(6)] == [0, 0, 1, 1, 2, 2]
    clock.hand_out(0)
    clock.train()
    clock.hand_out(1)
    assert [clock.train_version(step) for step in range(2, 6)] == [1, 1, 2, 2]
    clock.published(1)
    assert [clock.train_version(step) for step in range(2, 6)] == [1, 1, 2, 2]


def test_a_publish_that_is_late_is_not_counted_for_a_step_whose_turn_has_come() -> None:
    clock = TrainClock(version=3, next_step=0, batches_per_publish=1)
    for step in range(5):
        clock.train()
        assert clock.train_version(step) == 3
        clock.hand_out(step)
        # While this one trains, at most one publish can come before the next.
        assert clock.train_version(step + 1) == 4


def test_gaps_in_versions_are_followed() -> None:
    clock = TrainClock(version=0, next_step=0, batches_per_publish=1)
    clock.hand_out(0)
    clock.published(50)
    assert [clock.train_version(step) for step in (1, 2)] == [50, 51]


def test_the_service_knows_better_but_never_less() -> None:
    clock = TrainClock(version=5, next_step=0, batches_per_publish=1)
    clock.correct(3)
    assert clock.version == 5
    clock.correct(8)
    assert clock.train_version(0) == 8


def test_another_cadence_counts_from_now_on() -> None:
    clock = TrainClock(version=0, next_step=0, batches_per_publish=2)
    assert [clock.train_version(step) for step in range(4)] == [0, 0, 1, 1]
    clock.pace(1)
    assert [clock.train_version(step) for step in range(4)] == [0, 1, 2, 3]
