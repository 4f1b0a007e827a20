"""Feeder of tasks: submits them from any iterable to the service in the background.

Invariants: the cursor (tasks drawn from the iterable so far) is committed together with the tasks. So after a crash
each task of a deterministic iterable has been submitted exactly once. No more than one chunk of tasks is drawn before
it is submitted. An error of the iterable ends the feeding, and is raised in the trainer's thread at every check. An
error of the service is raised there once, and the chunk is submitted again when the trainer goes on.

An iterable can offer `state() -> bytes` (at most 64 KiB) and `load_state(state)`, to be put back to its place after a
restart. Any other iterable is skipped forward by the cursor. One with a state can also offer `report`, to hear what
became of its tasks (`trainer_client.session.outcomes`).
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Protocol, TypeVar, runtime_checkable

from buffer_wire.errors import InvalidField, RolloutBufferError, RunPaused
from rollout_buffer.v1 import runs_pb2
from trainer_client.client.driver import worth_repeating
from trainer_client.client.requests import Submission, new_request_id
from trainer_client.session.outcomes import Outcomes, Position, Tally, check_metadata, reported
from trainer_client.state import Resumed, Submitted
from trainer_client.tasks import Task

logger = logging.getLogger("trainer_client")

JOIN_S = 5.0
MOST_POLL_S = 1.0
FIRST_POLL_S = 0.05
REPORT_EVERY_S = 0.25
"""Shortest interval, in seconds, between two looks at what became of tasks."""

T = TypeVar("T")


@runtime_checkable
class StatefulTasks(Protocol):
    """Iterable of tasks that can save its place and go back to it."""

    def state(self) -> bytes:
        """Return the place after the last task that it gave."""

    def load_state(self, state: bytes) -> None:
        """Go on from that place at the next `iter`."""


class FeedTarget(Protocol):
    """Target of submits: the service, or a test's stand-in."""

    def submit(self, submission: Submission) -> Submitted:
        """Submit tasks; raises PendingFull soon. A repeat with the same request id changes nothing."""

    def pending(self) -> int:
        """Return the number of tasks pending now."""

    def records(self, after: str, enough: int) -> Sequence[runs_pb2.Record]:
        """Read events of the run's recording after `after`, as `ServiceClient.read_records` does."""


class TaskFeeder:
    """Feeder: a background thread that submits tasks. `start` it, call `raise_if_failed` regularly, `stop` it.

    `max_pending_tasks`: number of pending tasks at which it waits, at least 1. `chunk_tasks`: largest number of tasks
    drawn and submitted at once. `start`: where the term begins.
    """

    def __init__(
        self, tasks: Iterable[Task], target: FeedTarget, start: Resumed, *, max_pending_tasks: int, chunk_tasks: int
    ) -> None:
        if max_pending_tasks < 1:
            raise InvalidField("max_pending_tasks", max_pending_tasks, "at least 1")
        self._tasks = tasks
        self._target = target
        self._term = start.term
        self._cursor = start.cursor
        position, self._state = Position.unwrap(start.feeder_state)
        self._has_place = bool(start.cursor or start.feeder_state)
        self._outcomes = Outcomes(tasks, position) if reported(tasks) else None
        self._looked_at = -REPORT_EVERY_S
        self._unsaved = False
        """True when outcomes were reported that the state at the service does not know."""
        self._max_pending = max_pending_tasks
        self._chunk = max(1, min(chunk_tasks, max_pending_tasks // 2))
        self._stopped = threading.Event()
        self._moved = threading.Event()
        self._exhausted = threading.Event()
        self._failure: BaseException | None = None
        """Error that ended the feeding; None while it goes on."""
        self._refusal: RolloutBufferError | None = None
        """Error of the service. The feeding stands still until the trainer has met it and goes on."""
        self._refusal_met = False
        self._go_on = threading.Event()
        self._thread = threading.Thread(target=self._run, name="task-feeder", daemon=True)

    @property
    def cursor(self) -> int:
        """Tasks submitted so far, over all terms."""
        return self._cursor

    @property
    def tally(self) -> Tally | None:
        """Numbers of groups that were reported in this session; None where the iterable has no `report`."""
        return None if self._outcomes is None else self._outcomes.tally

    @property
    def exhausted(self) -> bool:
        """True when the iterable has ended and every task of it is submitted."""
        return self._exhausted.is_set()

    @property
    def stopped(self) -> bool:
        """True once `stop` was called."""
        return self._stopped.is_set()

    def start(self) -> None:
        """Begin to feed."""
        self._thread.start()

    def wake(self) -> None:
        """Look again whether there is room, because the workers have moved on."""
        self._moved.set()

    @property
    def failed(self) -> bool:
        """True when the feeding has an error that `raise_if_failed` would raise."""
        return self._failure is not None or (self._refusal is not None and not self._refusal_met)

    def raise_if_failed(self) -> None:
        """Raise the error that ended the feeding, if there is one, or the service's refusal, and that only once.

        The call after a refusal lets the feeding try again: somebody may have removed the cause.
        """
        if self._failure is not None:
            raise self._failure
        if self._refusal is None:
            return
        if not self._refusal_met:
            self._refusal_met = True
            raise self._refusal
        self._refusal = None
        self._go_on.set()

    def stop(self) -> None:
        """End the feeding; submitted tasks stay. Waits a little for the thread, not for a stuck iterable."""
        self._stopped.set()
        self._moved.set()
        self._go_on.set()
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)
            if self._thread.is_alive():
                logger.warning("the task feeder still waits inside the iterable of tasks or on the service")

    def _run(self) -> None:
        try:
            self._feed(self._positioned())
        except BaseException as error:  # noqa: BLE001 - handed over to the trainer's thread, whatever it is
            if not self._stopped.is_set():
                error.add_note(self._where())
                self._failure = error

    def _where(self) -> str:
        return f"raised in the task feeder, at cursor {self._cursor}"

    def _positioned(self) -> Iterator[Task]:
        """Iterate over the tasks from the one after the cursor."""
        if isinstance(self._tasks, StatefulTasks) and self._has_place:
            self._tasks.load_state(self._state)
            return iter(self._tasks)
        items = iter(self._tasks)
        for _ in islice(items, self._cursor):
            if self._stopped.is_set():
                break
        return items

    def _feed(self, items: Iterator[Task]) -> None:
        pending = self._asked(self._target.pending)
        while pending is not None and self._wait_for_room(pending):
            self._report()
            tasks = list(islice(items, self._chunk))
            if not tasks:
                self._exhausted.set()
                break
            if self._stopped.is_set():
                break
            if self._outcomes is not None:
                check_metadata(tasks)
            submitted = self._asked(partial(self._target.submit, self._submission(tasks)))
            if submitted is None:
                break
            self._cursor, pending, self._unsaved = submitted.cursor, submitted.pending_tasks, False
        if self._outcomes is not None:
            self._report_the_rest(self._outcomes)

    def _submission(self, tasks: Sequence[Task]) -> Submission:
        state = self._tasks.state() if isinstance(self._tasks, StatefulTasks) else b""
        return Submission(
            term=self._term,
            expected_cursor=self._cursor,
            cursor=self._cursor + len(tasks),
            tasks=tasks,
            feeder_state=state if self._outcomes is None else self._outcomes.position.wrap(state),
            request_id=new_request_id(),
        )

    def _report(self) -> None:
        """Tell the iterable what became of tasks since the last look."""
        if self._outcomes is None or time.monotonic() - self._looked_at < REPORT_EVERY_S:
            return
        looked = self._asked(partial(self._outcomes.follow, self._target.records))
        self._looked_at = time.monotonic()
        self._unsaved = self._unsaved or bool(looked)

    def _save(self) -> None:
        """Keep what was reported at the service, where no task takes it along.

        A run that is paused or draining takes none of it, nor does a service of 0.1.0; then it is reported once more to
        the state that is kept.
        """
        if not self._unsaved:
            return
        try:
            self._target.submit(self._submission([]))
        except RolloutBufferError as error:
            logger.debug("what was reported to the iterable of tasks is not kept yet: %s", error)
        else:
            self._unsaved = False

    def _report_the_rest(self, outcomes: Outcomes) -> None:
        """Report until stopped, all tasks being submitted, and once more after that."""
        while not self._stopped.is_set():
            self._report()
            self._save()
            self._wait(MOST_POLL_S)
        try:
            self._unsaved = outcomes.follow(self._target.records) or self._unsaved
        except RolloutBufferError as error:
            logger.debug("what became of the last tasks is reported to the next session: %s", error)
        self._save()

    def _asked(self, call: Callable[[], T]) -> T | None:
        """Repeat `call` until the service answers it, and return the answer; None when stopped.

        A lack of room, no answer and a paused run are waited out: the trainer's own pulls meet them as well, and report
        them. Every other error is left to the trainer.
        """
        for poll_s in _polls():
            if self._stopped.is_set():
                break
            try:
                return call()
            except RolloutBufferError as error:
                if worth_repeating(error) or isinstance(error, RunPaused):
                    self._wait(poll_s)
                else:
                    self._refused(error)
        return None

    def _refused(self, error: RolloutBufferError) -> None:
        """Leave `error` to the trainer; returns when the trainer has met it and goes on, or when stopped."""
        error.add_note(self._where())
        self._go_on.clear()
        self._refusal_met = False
        self._refusal = error
        if not self._stopped.is_set():
            self._go_on.wait()

    def _wait_for_room(self, pending: int) -> bool:
        """Wait until a chunk fits below the cap; False when stopped."""
        asked: int | None = pending
        for poll_s in _polls():
            if self._stopped.is_set() or asked is None:
                return False
            if asked + self._chunk <= self._max_pending:
                return True
            self._report()
            if poll_s == MOST_POLL_S:
                self._save()
            self._wait(poll_s)
            asked = self._asked(self._target.pending)
        return False

    def _wait(self, poll_s: float) -> None:
        self._moved.wait(poll_s)
        if not self._stopped.is_set():
            self._moved.clear()


def _polls() -> Iterator[float]:
    poll_s = FIRST_POLL_S
    while True:
        yield poll_s
        poll_s = min(poll_s * 1.5, MOST_POLL_S)
