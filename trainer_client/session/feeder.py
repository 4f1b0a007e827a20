"""Feeder of tasks: submits them from any iterable to the service in the background.

Invariants: the cursor (tasks drawn from the iterable so far) is committed together with the tasks. So after a crash
each task of a deterministic iterable has been submitted exactly once. No more than one chunk of tasks is drawn before
it is submitted. An error of the iterable ends the feeding, and is raised in the trainer's thread at every check. An
error of the service is raised there once, and the chunk is submitted again when the trainer goes on.

An iterable can offer `state() -> bytes` (at most 64 KiB) and `load_state(state)`, to be put back to its place after a
restart. Any other iterable is skipped forward by the cursor.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Protocol, TypeVar, runtime_checkable

from buffer_wire.errors import InvalidField, RolloutBufferError, RunPaused
from trainer_client.client.driver import worth_repeating
from trainer_client.client.requests import Submission, new_request_id
from trainer_client.state import Resumed, Submitted
from trainer_client.tasks import Task

logger = logging.getLogger("trainer_client")

JOIN_S = 5.0
MOST_POLL_S = 1.0
FIRST_POLL_S = 0.05

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
        self._feeder_state = start.feeder_state
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
        if self._cursor == 0:
            return iter(self._tasks)
        if isinstance(self._tasks, StatefulTasks):
            self._tasks.load_state(self._feeder_state)
            return iter(self._tasks)
        items = iter(self._tasks)
        for _ in islice(items, self._cursor):
            if self._stopped.is_set():
                break
        return items

    def _feed(self, items: Iterator[Task]) -> None:
        pending = self._asked(self._target.pending)
        while pending is not None and self._wait_for_room(pending):
            tasks = list(islice(items, self._chunk))
            if not tasks:
                self._exhausted.set()
                return
            if self._stopped.is_set():
                return
            submission = Submission(
                term=self._term,
                expected_cursor=self._cursor,
                cursor=self._cursor + len(tasks),
                tasks=tasks,
                feeder_state=self._tasks.state() if isinstance(self._tasks, StatefulTasks) else b"",
                request_id=new_request_id(),
            )
            submitted = self._asked(partial(self._target.submit, submission))
            if submitted is None:
                return
            self._cursor, pending = submitted.cursor, submitted.pending_tasks

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
