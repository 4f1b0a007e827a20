"""Breaker on a clock of its own: when it opens, when a trial is due, what closes it."""

import pytest

from buffer_wire.connection.retry import Backoff
from rollout_workers.engine.errors import (
    EngineError,
    EngineLoadFailed,
    EngineMalformed,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
)
from rollout_workers.slots.breaker import Breaker, counts


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def breaker(clock: Clock, failures: int = 3) -> Breaker:
    return Breaker(failures, pauses=Backoff(first_s=4.0, ceiling_s=8.0), now_s=clock)


def test_it_opens_after_failures_in_a_row_and_not_by_scattered_ones() -> None:
    tested = breaker(Clock())
    for _ in range(5):
        assert not tested.failed()
        assert not tested.failed()
        assert not tested.succeeded()
    assert [tested.failed() for _ in range(4)] == [False, False, True, False]
    assert tested.is_open


def test_a_trial_is_due_after_a_pause_and_a_failed_one_makes_the_next_pause_longer() -> None:
    clock = Clock()
    tested = breaker(clock, failures=1)
    assert tested.trial_in_s == float("inf")
    tested.failed()
    assert 2.0 <= tested.trial_in_s <= 4.0
    clock.now += 4.0
    assert tested.trial_in_s == 0
    tested.tried()
    tested.failed()
    assert 4.0 <= tested.trial_in_s <= 8.0
    assert tested.is_open


def test_any_success_closes_it_and_forgets_the_failures() -> None:
    clock = Clock()
    tested = breaker(clock, failures=2)
    tested.failed()
    tested.failed()
    assert tested.succeeded()
    assert (tested.is_open, tested.failures, tested.trial_in_s) == (False, 0, float("inf"))
    assert not tested.failed()


@pytest.mark.parametrize(
    ("error", "against_the_engine"),
    [
        (EngineUnavailable("e", "generating", "reset"), True),
        (EngineTimeout("e", "generating", 1.0), True),
        (EngineMalformed("e", "generating", "nonsense"), True),
        (EngineRejected("e", "generating", 500, "internal"), True),
        (EngineRejected("e", "generating", 503, "the queue is full"), False),
        (EngineRejected("e", "generating", 400, "unknown parameter"), False),
        (EngineLoadFailed("e", "p", "1.1", cause="shape", weights="kept"), False),
    ],
)
def test_only_failures_of_the_engine_itself_count(error: EngineError, against_the_engine: bool) -> None:
    assert counts(error) is against_the_engine
