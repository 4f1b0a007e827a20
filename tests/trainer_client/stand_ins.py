"""Stand-ins for the service that follow its rules of feeding and pulling, in memory."""

import threading
from collections.abc import Callable

from buffer_wire.errors import BatchNotReady, CursorConflict, InvalidField, PendingFull
from buffer_wire.revisions import Revisions
from tests.support.push import arrays_for
from tests.trainer_client.fake_service import pull_messages
from trainer_client.batch import Batch
from trainer_client.replies import PullAssembly
from trainer_client.requests import Submission
from trainer_client.state import Submitted
from trainer_client.waiting import OnWait


class Inbox:
    """The feeder's target: compare-and-set on the cursor, a cap on pending tasks."""

    def __init__(self, limit: int = 10_000, cursor: int = 0) -> None:
        self.limit = limit
        self.cursor = cursor
        self.feeder_state = b""
        self.taken: list[str] = []
        self.waiting: list[str] = []
        self.refused = 0
        self.most_pending = 0
        self._changed = threading.Condition()

    def submit(self, submission: Submission) -> Submitted:
        with self._changed:
            if submission.expected_cursor != self.cursor:
                raise CursorConflict(submission.expected_cursor, self.cursor)
            if len(self.waiting) + len(submission.tasks) > self.limit:
                self.refused += 1
                self._changed.notify_all()
                raise PendingFull(len(self.waiting), self.limit)
            self.waiting += [task.task_id for task in submission.tasks]
            self.most_pending = max(self.most_pending, len(self.waiting))
            self.cursor, self.feeder_state = submission.cursor, submission.feeder_state
            self._changed.notify_all()
            return Submitted(self.cursor, tuple(task.task_id for task in submission.tasks), len(self.waiting))

    def pending(self) -> int:
        with self._changed:
            self._changed.notify_all()
            return len(self.waiting)

    def take(self, count: int, timeout_s: float = 10) -> list[str]:
        """Wait for `count` pending tasks and take them away, as workers do."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.waiting) >= count, timeout_s), self.waiting
            taken, self.waiting = self.waiting[:count], self.waiting[count:]
            self.taken += taken
            return taken

    def wait_until(self, condition: Callable[["Inbox"], bool], timeout_s: float = 10) -> None:
        """Wait until `condition` holds; looked at whenever the feeder asks or submits."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), timeout_s), vars(self)


def batch_of(step: int, train_version: int = 0, groups: int = 1, response_len: int = 6) -> Batch:
    """A batch of `groups` small groups."""
    assembly = PullAssembly("r", Revisions(), 0.0)
    made = [arrays_for(f"s{step}g{i}", response_len=response_len) for i in range(groups)]
    for message in pull_messages(made, step=step, train_version=train_version):
        assembly.add(message)
    return assembly.finish()


class Shelf:
    """The pullers' source: steps up to `ready` can be pulled, for no version below the published one."""

    def __init__(self, ready: int = 1 << 30) -> None:
        self.ready = ready
        self.published_version = 0
        self.pulls: list[tuple[int, int]] = []
        """(step, train_version) of every pull that gave a batch, in order."""
        self.attempts: list[tuple[int, int]] = []
        self.pending = 1
        self.failure: Exception | None = None
        self.make: Callable[[int, int], Batch] = batch_of
        self.changed = threading.Condition()

    def pull(self, step: int, train_version: int, timeout_s: float, on_wait: OnWait | None) -> Batch:
        with self.changed:
            self.attempts.append((step, train_version))
            self.changed.notify_all()
            if self.failure is not None:
                raise self.failure
            if train_version < self.published_version:
                raise InvalidField("train_version", train_version, f"at least {self.published_version}")
            if not self.changed.wait_for(lambda: step < self.ready, min(timeout_s, 0.02)):
                raise BatchNotReady(
                    step=step, queued_groups=0, needed_groups=1, leased=0, pending=self.pending, waits_on="the workers"
                )
            self.pulls.append((step, train_version))
            self.changed.notify_all()
            return self.make(step, train_version)

    def wait_for_pulls(self, count: int, timeout_s: float = 10) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.pulls) >= count, timeout_s), self.pulls
