"""Batches by step, at once and ahead: order, versions, bounds, ends and errors."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from buffer_wire.errors import (
    BatchNotReady,
    FailureBudgetExceeded,
    InvalidField,
    RunPaused,
    StaleTerm,
    StoreRolledBack,
)
from buffer_wire.status import ServiceUnreachable
from tests.trainer_client.stand_ins import Shelf, batch_of
from trainer_client.client.pulling import PullLoop
from trainer_client.micro_batches import PullKey
from trainer_client.session.clock import TrainClock
from trainer_client.session.pulls.prefetch import Prefetcher
from trainer_client.session.pulls.puller import Puller, PullSource

if TYPE_CHECKING:
    from trainer_client.waiting import OnWait, Waiting

pytestmark = pytest.mark.matrix


class Rig:
    """A shelf, a clock and a puller, and a training loop's moves."""

    def __init__(
        self,
        prefetch: int = 0,
        *,
        timeout_s: float = 10,
        max_bytes: int = 1 << 30,
        per_publish: int = 1,
        micro_batches: int = 1,
    ) -> None:
        self.shelf = Shelf(micro_batches=micro_batches)
        self.pull_key = PullKey(0)
        self.clock = TrainClock(version=0, next_step=0, batches_per_publish=per_publish)
        self.ended = False
        self.waits: list[Waiting] = []
        self.on_wait: OnWait = self.waits.append
        self.background: Exception | None = None
        self.prefetch = prefetch
        self.timeout_s = timeout_s
        self.max_bytes = max_bytes
        self._puller: Puller | Prefetcher | None = None

    @property
    def puller(self) -> Puller | Prefetcher:
        if self._puller is None:
            source = PullSource(
                pull=self.shelf.pull,
                published=lambda: self.shelf.published_version,
                exhausted=lambda: self.ended,
                check=self._check,
                loop=PullLoop("there"),
                on_wait=self.on_wait,
            )
            if self.prefetch == 0:
                self._puller = Puller(source, self.clock, self.timeout_s)
            else:
                self._puller = Prefetcher(
                    source, self.clock, self.timeout_s, prefetch=self.prefetch, max_bytes=self.max_bytes
                )
        return self._puller

    def _check(self) -> None:
        if self.background is not None:
            raise self.background

    def next(self) -> int | None:
        """Take the next micro-batch as the session does; its step."""
        self.clock.train()
        batch = self.puller.take(self.pull_key)
        if batch is None:
            return None
        self.pull_key = PullKey.after(batch)
        if batch.final:
            self.clock.hand_out(batch.step)
        return batch.step

    def publish(self) -> None:
        self.shelf.published_version += 1
        self.clock.published(self.shelf.published_version)


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    made: list[Rig] = []
    yield made
    for rig in made:
        rig.puller.stop()


@pytest.fixture(params=[0, 1, 3])
def rig(request: pytest.FixtureRequest, rigs: list[Rig]) -> Rig:
    rigs.append(Rig(request.param))
    return rigs[0]


def test_steps_come_in_order_each_for_the_version_that_trains_on_it(rig: Rig) -> None:
    for step in range(8):
        assert rig.next() == step
        rig.publish()
    assert rig.shelf.pulls[:8] == [(step, step) for step in range(8)]


def test_versions_follow_the_batches_of_a_publish(rigs: list[Rig]) -> None:
    rigs.append(Rig(prefetch=2, per_publish=3))
    rig = rigs[0]
    for step in range(9):
        assert rig.next() == step
        if step % 3 == 2:
            rig.publish()
    assert rig.shelf.pulls[:9] == [(step, step // 3) for step in range(9)]


def test_no_more_is_pulled_ahead_than_asked_for(rigs: list[Rig]) -> None:
    rigs.append(Rig(prefetch=2))
    rig = rigs[0]
    rig.next()
    rig.shelf.wait_for_pulls(3)
    with rig.shelf.changed:
        assert not rig.shelf.changed.wait_for(lambda: len(rig.shelf.attempts) > 3, 0.2)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_micro_batches_come_in_order_and_the_first_says_which_version_trains(rigs: list[Rig], prefetch: int) -> None:
    rigs.append(Rig(prefetch, micro_batches=3))
    rig = rigs[0]
    for step in range(4):
        assert [rig.next() for _ in range(3)] == [step] * 3
        rig.publish()
    assert rig.shelf.given[:12] == [PullKey(step, micro_batch) for step in range(4) for micro_batch in range(3)]
    assert rig.shelf.pulls[:4] == [(step, step) for step in range(4)]
    assert {version for pull_key, version in rig.shelf.attempts if pull_key.micro_batch} == {None}


def test_micro_batches_of_the_step_in_hand_are_no_batches_ahead(rigs: list[Rig]) -> None:
    rigs.append(Rig(prefetch=1, micro_batches=4))
    rig = rigs[0]
    assert rig.next() == 0
    # The rest of step 0 and all of step 1; step 2 would be one too many.
    rig.shelf.wait_for_pulls(8)
    with rig.shelf.changed:
        assert not rig.shelf.changed.wait_for(lambda: len(rig.shelf.attempts) > 8, 0.2)
    for _ in range(3):
        assert rig.next() == 0
    assert rig.next() == 1
    rig.shelf.wait_for_pulls(12)


def test_micro_batches_ahead_are_bounded_by_their_bytes(rigs: list[Rig]) -> None:
    size = batch_of(0).received_bytes
    rigs.append(Rig(prefetch=4, max_bytes=round(3.5 * size), micro_batches=4))
    rig = rigs[0]
    assert rig.next() == 0
    rig.shelf.wait_for_pulls(4)
    with rig.shelf.changed:
        assert not rig.shelf.changed.wait_for(lambda: len(rig.shelf.attempts) > 4, 0.2)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_step_that_cannot_be_filled_ends_the_micro_batches(rigs: list[Rig], prefetch: int) -> None:
    rigs.append(Rig(prefetch, micro_batches=3))
    rig = rigs[0]
    rig.shelf.ready, rig.shelf.pending, rig.ended = PullKey(1, 1), 0, True
    assert [rig.next() for _ in range(5)] == [0, 0, 0, 1, None]


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_drained_run_ends_the_steps(rigs: list[Rig], prefetch: int) -> None:
    rigs.append(Rig(prefetch))
    rig = rigs[0]
    assert rig.next() == 0
    rig.shelf.wait_for_pulls(1 + prefetch)
    rig.shelf.failure = RunPaused("r", "drained")
    steps = [rig.next() for _ in range(3)]
    assert steps == ([1, None, None] if prefetch else [None, None, None])


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_run_that_an_operator_holds_is_waited_for(rigs: list[Rig], prefetch: int) -> None:
    rigs.append(Rig(prefetch))
    rig = rigs[0]
    held = iter([RunPaused("r", "operator")] * 3)

    def make(step: int, version: int) -> object:
        for error in held:
            raise error
        return batch_of(step, version)

    rig.shelf.make = make  # type: ignore[assignment]
    assert rig.next() == 0
    if prefetch == 0:
        assert [waiting.on for waiting in rig.waits] == ["an operator, who has to continue the run"] * 3


def test_no_more_is_held_than_the_bytes_allow(rigs: list[Rig]) -> None:
    size = batch_of(0).received_bytes
    rigs.append(Rig(prefetch=10, max_bytes=round(2.5 * size)))
    rig = rigs[0]
    assert isinstance(rig.puller, Prefetcher)
    rig.shelf.wait_for_pulls(2)
    with rig.shelf.changed:
        assert not rig.shelf.changed.wait_for(lambda: len(rig.shelf.attempts) > 2, 0.2)
    assert rig.next() == 0
    rig.shelf.wait_for_pulls(3)


def test_one_batch_is_pulled_however_large(rigs: list[Rig]) -> None:
    rigs.append(Rig(prefetch=2, max_bytes=1))
    assert [rigs[0].next() for _ in range(4)] == [0, 1, 2, 3]


def test_a_version_that_is_too_low_is_asked_for_again(rig: Rig) -> None:
    rig.shelf.published_version = 5
    assert rig.next() == 0
    assert rig.shelf.pulls[0] == (0, 5)


def test_the_end_of_the_tasks_ends_the_steps(rig: Rig) -> None:
    rig.shelf.ready, rig.shelf.pending = PullKey(2), 0
    rig.ended = True
    assert [rig.next(), rig.next(), rig.next(), rig.next()] == [0, 1, None, None]


def test_tasks_still_at_work_are_waited_for(rigs: list[Rig]) -> None:
    rigs.append(Rig(timeout_s=0.1))
    rig = rigs[0]
    rig.shelf.ready, rig.shelf.pending, rig.ended = PullKey(0), 1, True
    with pytest.raises(BatchNotReady):
        rig.next()


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_trainer_that_waits_too_long_hears_on_whom(rigs: list[Rig], prefetch: int) -> None:
    rigs.append(Rig(prefetch, timeout_s=0.3))
    rig = rigs[0]
    rig.shelf.ready = PullKey(1)
    assert rig.next() == 0
    with pytest.raises(BatchNotReady) as raised:
        rig.next()
    assert raised.value.attributes["waits_on"] == "the workers"
    rig.shelf.ready = PullKey(5)
    assert rig.next() == 1


def test_a_trainer_that_waits_is_told_on_whom(rigs: list[Rig]) -> None:
    rigs.append(Rig(timeout_s=0.3))
    rigs[0].shelf.ready = PullKey(0)
    with pytest.raises(BatchNotReady):
        rigs[0].next()
    assert {(waiting.doing, waiting.on) for waiting in rigs[0].waits} == {("pulling step 0", "the workers")}


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_service_that_is_away_for_longer_than_one_try_is_waited_for(rigs: list[Rig], prefetch: int) -> None:
    rigs.append(Rig(prefetch))
    rig = rigs[0]
    away = iter([ServiceUnreachable("UNAVAILABLE", status="UNAVAILABLE")] * 3)

    def make(step: int, version: int) -> object:
        for error in away:
            raise error
        return batch_of(step, version)

    rig.shelf.make = make  # type: ignore[assignment]
    assert rig.next() == 0


@pytest.mark.parametrize(
    "error",
    [StaleTerm(1, 2), FailureBudgetExceeded(3, 2, "boom"), StoreRolledBack("r", 9, 3)],
    ids=lambda e: e.reason,
)
def test_errors_that_nothing_cures_end_the_loop(rig: Rig, error: Exception) -> None:
    rig.shelf.failure = error
    with pytest.raises(type(error)):
        rig.next()


@pytest.mark.parametrize("error", [FailureBudgetExceeded(3, 2, "boom"), RunPaused("r", "failure_budget_exceeded")])
def test_what_an_operator_has_mended_is_no_error_any_more(rig: Rig, error: Exception) -> None:
    assert rig.next() == 0
    rig.shelf.wait_for_pulls(1 + rig.prefetch)
    rig.shelf.failure = error
    for step in range(1, 1 + rig.prefetch):
        assert rig.next() == step
    for _ in range(2):
        with pytest.raises(type(error)):
            rig.next()
    rig.shelf.failure = None
    assert [rig.next() for _ in range(3)] == [1 + rig.prefetch + i for i in range(3)]


def test_what_was_mended_before_the_trainer_waited_is_not_raised(rigs: list[Rig]) -> None:
    rigs.append(Rig(prefetch=1))
    rig = rigs[0]
    rig.shelf.failure = FailureBudgetExceeded(3, 2, "boom")
    assert isinstance(rig.puller, Prefetcher)
    deadline = time.monotonic() + 10
    while rig.puller._refusal is None:
        assert time.monotonic() < deadline, "nothing was refused"
        time.sleep(0.002)
    rig.shelf.failure = None
    assert [rig.next() for _ in range(3)] == [0, 1, 2]


def test_what_broke_the_prefetching_itself_is_raised_every_time(rigs: list[Rig]) -> None:
    rigs.append(Rig(prefetch=1))
    rig = rigs[0]
    rig.shelf.failure = TypeError("batch_groups is a function that cannot be called")
    for _ in range(2):
        with pytest.raises(TypeError):
            rig.next()
    rig.shelf.failure = None
    with pytest.raises(TypeError):
        rig.next()


@pytest.mark.parametrize("prefetch", [0, 1])
def test_what_goes_wrong_elsewhere_ends_a_wait(rigs: list[Rig], prefetch: int) -> None:
    rigs.append(Rig(prefetch))
    rigs[0].shelf.ready = PullKey(0)
    rigs[0].background = OSError("the feeder died")
    with pytest.raises(OSError, match="the feeder died"):
        rigs[0].next()


def test_a_batch_that_is_there_is_given_before_a_later_error(rigs: list[Rig]) -> None:
    rigs.append(Rig(prefetch=1))
    rig = rigs[0]
    assert isinstance(rig.puller, Prefetcher)
    rig.shelf.wait_for_pulls(1)
    rig.shelf.failure = StaleTerm(1, 2)
    assert rig.next() == 0
    with pytest.raises(StaleTerm) as raised:
        rig.next()
    assert "raised while prefetching step 1" in raised.value.__notes__


def test_stopping_ends_a_wait_in_the_background(rigs: list[Rig]) -> None:
    rigs.append(Rig(prefetch=1))
    rigs[0].shelf.ready = PullKey(0)
    puller = rigs[0].puller
    assert isinstance(puller, Prefetcher)
    puller.stop()
    assert not puller._thread.is_alive()


def test_a_prefetch_of_nothing_is_refused() -> None:
    clock = TrainClock(0, 0, 1)
    with pytest.raises(InvalidField):
        Prefetcher(None, clock, 1, prefetch=0, max_bytes=1)  # type: ignore[arg-type]
