"""Feeding: every task once, never too many, and errors where the trainer sees them."""

import itertools
import threading
import time
from collections.abc import Iterator

import pytest

from buffer_wire.errors import CursorConflict, InvalidField, PermissionDenied, StaleTerm, StoreUnavailable
from buffer_wire.status import ServiceUnreachable
from tests.trainer_client.stand_ins import Inbox
from trainer_client import SamplingParams, Task
from trainer_client.client.requests import Submission
from trainer_client.session.feeder import TaskFeeder
from trainer_client.state import Resumed, Submitted

pytestmark = pytest.mark.matrix


def task(number: int) -> Task:
    return Task(task_id=f"t{number}", group_size=1, sampling=SamplingParams(max_new_tokens=1), prompt_token_ids=[1])


def feeder_of(
    tasks: object, inbox: Inbox, *, max_pending: int = 1000, chunk: int = 10, state: bytes = b""
) -> TaskFeeder:
    start = Resumed(1, next_step=0, next_unassembled_step=0, version=0, cursor=inbox.cursor, feeder_state=state)
    return TaskFeeder(tasks, inbox, start, max_pending_tasks=max_pending, chunk_tasks=chunk)  # type: ignore[arg-type]


def wait_for_failure(feeder: TaskFeeder) -> None:
    deadline = time.monotonic() + 10
    while not feeder.failed:
        assert time.monotonic() < deadline, "the feeder does not fail"
        time.sleep(0.002)


def test_a_finite_iterable_is_fed_once_and_in_order() -> None:
    inbox = Inbox()
    feeder = feeder_of([task(i) for i in range(25)], inbox)
    feeder.start()
    assert inbox.take(25) == [f"t{i}" for i in range(25)]
    feeder._thread.join(10)
    assert feeder.exhausted
    assert (feeder.cursor, inbox.cursor) == (25, 25)
    feeder.raise_if_failed()
    feeder.stop()


def test_no_more_tasks_are_pending_than_the_cap() -> None:
    inbox = Inbox()
    feeder = feeder_of(map(task, itertools.count()), inbox, max_pending=30, chunk=10)
    feeder.start()
    inbox.wait_until(lambda inbox: len(inbox.waiting) == 30)
    for _ in range(20):
        inbox.take(7)
        feeder.wake()
    feeder.stop()
    assert inbox.most_pending == 30
    assert inbox.taken == [f"t{i}" for i in range(140)]
    assert not feeder.exhausted


def test_the_service_s_own_cap_is_waited_out() -> None:
    inbox = Inbox(limit=12)
    feeder = feeder_of(map(task, itertools.count()), inbox, max_pending=1000, chunk=10)
    feeder.start()
    inbox.wait_until(lambda inbox: inbox.refused >= 2)
    inbox.take(10)
    feeder.wake()
    assert inbox.take(10) == [f"t{i}" for i in range(10, 20)]
    feeder.stop()
    feeder.raise_if_failed()


def test_a_later_feeder_goes_on_after_the_cursor() -> None:
    inbox = Inbox(cursor=17)
    feeder = feeder_of([task(i) for i in range(25)], inbox)
    feeder.start()
    assert inbox.take(8) == [f"t{i}" for i in range(17, 25)]
    feeder.stop()


class Stateful:
    """Counts; says where it stands and can be put back there."""

    def __init__(self) -> None:
        self.next = 0
        self.loaded: list[bytes] = []

    def __iter__(self) -> Iterator[Task]:
        while True:
            self.next += 1
            yield task(self.next - 1)

    def state(self) -> bytes:
        return str(self.next).encode()

    def load_state(self, state: bytes) -> None:
        self.loaded.append(state)
        self.next = int(state)


def test_an_iterable_with_a_state_is_put_back_to_the_state_of_the_cursor() -> None:
    inbox, first = Inbox(), Stateful()
    feeder = feeder_of(first, inbox, max_pending=20, chunk=10)
    feeder.start()
    inbox.wait_until(lambda inbox: inbox.cursor == 20)
    feeder.stop()
    assert first.loaded == []
    assert inbox.feeder_state == b"20"
    inbox.take(20)
    second = Stateful()
    feeder = feeder_of(second, inbox, max_pending=20, chunk=10, state=inbox.feeder_state)
    feeder.start()
    assert inbox.take(10) == [f"t{i}" for i in range(20, 30)]
    feeder.stop()
    assert second.loaded == [b"20"]


def test_no_more_than_a_chunk_is_drawn_ahead_of_what_is_submitted() -> None:
    drawn = []

    def draw() -> Iterator[Task]:
        for i in itertools.count():
            drawn.append(i)
            yield task(i)

    inbox = Inbox()
    feeder = feeder_of(draw(), inbox, max_pending=20, chunk=10)
    feeder.start()
    inbox.wait_until(lambda inbox: inbox.cursor == 20)
    feeder.stop()
    assert len(drawn) <= 30


def test_an_error_of_the_iterable_surfaces_with_the_cursor() -> None:
    def broken() -> Iterator[Task]:
        yield from map(task, range(10))
        raise OSError("dataset gone")

    inbox = Inbox()
    feeder = feeder_of(broken(), inbox)
    feeder.start()
    inbox.take(10)
    feeder._thread.join(10)
    with pytest.raises(OSError, match="dataset gone") as raised:
        feeder.raise_if_failed()
    assert raised.value.__notes__ == ["raised in the task feeder, at cursor 10"]
    assert not feeder.exhausted
    feeder.stop()


def test_an_iterable_that_has_raised_is_not_taken_for_one_that_has_ended() -> None:
    def broken() -> Iterator[Task]:
        yield from map(task, range(10))
        raise StoreUnavailable("the dataset's own", "gone")

    inbox = Inbox()
    feeder = feeder_of(broken(), inbox)
    feeder.start()
    inbox.take(10)
    feeder._thread.join(10)
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            feeder.raise_if_failed()
    assert feeder.failed
    assert not feeder.exhausted
    feeder.stop()


@pytest.mark.parametrize("method", ["submit", "pending"])
@pytest.mark.parametrize(
    "error", [ServiceUnreachable("UNAVAILABLE", status="UNAVAILABLE"), StoreUnavailable("s", "loading")]
)
def test_a_service_that_is_away_for_longer_than_one_call_is_waited_for(method: str, error: Exception) -> None:
    inbox = Inbox()
    inbox.errors[method] = [error, error]
    feeder = feeder_of([task(i) for i in range(25)], inbox)
    feeder.start()
    assert inbox.take(25) == [f"t{i}" for i in range(25)]
    assert inbox.refused == 2
    feeder.raise_if_failed()
    feeder.stop()


@pytest.mark.parametrize("method", ["submit", "pending"])
def test_what_the_service_refuses_is_raised_once_and_tried_again(method: str) -> None:
    inbox = Inbox()
    inbox.errors[method] = [PermissionDenied("SubmitTasks", "ours", "trainer", "write here")]
    feeder = feeder_of([task(i) for i in range(25)], inbox)
    feeder.start()
    wait_for_failure(feeder)
    with pytest.raises(PermissionDenied) as raised:
        feeder.raise_if_failed()
    assert raised.value.__notes__ == ["raised in the task feeder, at cursor 0"]
    # It is the trainer's turn: nothing is asked before it calls again.
    assert not feeder.failed
    assert inbox.cursor == 0
    feeder.raise_if_failed()
    assert inbox.take(25) == [f"t{i}" for i in range(25)]
    feeder._thread.join(10)
    assert feeder.exhausted
    feeder.raise_if_failed()
    feeder.stop()


def test_what_was_drawn_is_submitted_again_as_the_same_request() -> None:
    inbox = Inbox()
    inbox.errors["submit"] = [
        PermissionDenied("SubmitTasks", "ours", "trainer", "write here"),
        ServiceUnreachable("UNAVAILABLE", status="UNAVAILABLE"),
    ]
    drawn = iter([task(i) for i in range(10)])
    feeder = feeder_of(drawn, inbox)
    feeder.start()
    wait_for_failure(feeder)
    with pytest.raises(PermissionDenied):
        feeder.raise_if_failed()
    feeder.raise_if_failed()
    assert inbox.take(10) == [f"t{i}" for i in range(10)]
    assert len(inbox.requests) == 3
    assert len(set(inbox.requests)) == 1
    feeder.stop()


def test_stopping_ends_a_feeder_whose_refusal_nobody_has_met() -> None:
    inbox = Inbox()
    inbox.errors["submit"] = [PermissionDenied("SubmitTasks", "ours", "trainer", "write here")]
    feeder = feeder_of(map(task, itertools.count()), inbox)
    feeder.start()
    wait_for_failure(feeder)
    feeder.stop()
    assert not feeder._thread.is_alive()


def test_a_cursor_that_somebody_else_moved_is_raised_however_often_it_is_tried() -> None:
    inbox = Inbox()
    feeder = feeder_of(map(task, itertools.count()), inbox)
    inbox.cursor = 5
    feeder.start()
    for _ in range(2):
        wait_for_failure(feeder)
        with pytest.raises(CursorConflict):
            feeder.raise_if_failed()
        feeder.raise_if_failed()
    feeder.stop()
    assert inbox.taken == inbox.waiting == []


def test_a_newer_trainer_holds_the_feeding() -> None:
    class Fenced(Inbox):
        def submit(self, submission: Submission) -> Submitted:
            raise StaleTerm(submission.term, 2)

    feeder = feeder_of(map(task, itertools.count()), Fenced())
    feeder.start()
    wait_for_failure(feeder)
    with pytest.raises(StaleTerm):
        feeder.raise_if_failed()
    feeder.stop()


@pytest.mark.parametrize("why", ["operator", "draining", "failure_budget_exceeded"])
def test_a_run_that_stands_still_is_fed_again_when_it_is_continued(why: str) -> None:
    """The trainer's own pulls say that it stands still; feeding has no part in what continues it."""
    inbox = Inbox()
    inbox.paused = why
    feeder = feeder_of([task(i) for i in range(15)], inbox)
    feeder.start()
    inbox.wait_until(lambda inbox: inbox.refused >= 2)
    inbox.paused = ""
    assert inbox.take(15) == [f"t{i}" for i in range(15)]
    feeder.stop()
    feeder.raise_if_failed()


def test_stopping_does_not_wait_for_room() -> None:
    inbox = Inbox()
    feeder = feeder_of(map(task, itertools.count()), inbox, max_pending=20, chunk=10)
    feeder.start()
    inbox.wait_until(lambda inbox: inbox.cursor == 20)
    feeder.stop()
    assert not feeder._thread.is_alive()
    assert inbox.cursor == 20


def test_an_error_after_the_stop_is_nobody_s_business() -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow() -> Iterator[Task]:
        yield task(0)
        entered.set()
        leave.wait(10)
        raise OSError("closed by the stop")

    feeder = feeder_of(slow(), Inbox())
    feeder.start()
    assert entered.wait(10)
    feeder._stopped.set()
    leave.set()
    feeder.stop()
    feeder.raise_if_failed()


@pytest.mark.parametrize("max_pending", [1, 2, 3])
def test_a_small_cap_still_lets_tasks_through(max_pending: int) -> None:
    inbox = Inbox()
    feeder = feeder_of([task(i) for i in range(7)], inbox, max_pending=max_pending)
    feeder.start()
    for i in range(7):
        assert inbox.take(1) == [f"t{i}"]
        feeder.wake()
    feeder.stop()
    assert inbox.most_pending <= max_pending


def test_a_cap_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidField):
        feeder_of([], Inbox(), max_pending=0)
