"""Stand-ins for the service that follow its rules of feeding and pulling, in memory."""

import threading
from collections.abc import Callable

from buffer_wire.errors import BatchNotReady, CursorConflict, InvalidField, PendingFull, RunPaused
from buffer_wire.revisions import Revisions
from tests.support.push import arrays_for
from tests.trainer_client.fake_service import pull_messages
from trainer_client.batch import Batch
from trainer_client.client.assembly import PullAssembly
from trainer_client.client.driver import Deadline
from trainer_client.client.requests import Submission
from trainer_client.micro_batches import PullKey
from trainer_client.state import Submitted


class Inbox:
    """The feeder's target: compare-and-set on the cursor, a cap on pending tasks."""

    def __init__(self, limit: int = 10_000, cursor: int = 0) -> None:
        self.limit = limit
        self.cursor = cursor
        self.feeder_state = b""
        self.taken: list[str] = []
        self.waiting: list[str] = []
        self.refused = 0
        self.paused = ""
        """Paused: why every submit is refused, if it is."""
        self.errors: dict[str, list[Exception]] = {"submit": [], "pending": []}
        """Errors: what the next calls of a method meet instead, the last one of the list first."""
        self.requests: list[str] = []
        """Request ids of all submits, of the refused ones too."""
        self.most_pending = 0
        self._changed = threading.Condition()

    def submit(self, submission: Submission) -> Submitted:
        with self._changed:
            self.requests.append(submission.request_id)
            self._met("submit")
            if submission.expected_cursor != self.cursor:
                raise CursorConflict(submission.expected_cursor, self.cursor)
            if self.paused:
                self.refused += 1
                self._changed.notify_all()
                raise RunPaused("r", self.paused)
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
            self._met("pending")
            self._changed.notify_all()
            return len(self.waiting)

    def _met(self, method: str) -> None:
        if self.errors[method]:
            self.refused += 1
            self._changed.notify_all()
            raise self.errors[method].pop()

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


def batch_of(
    step: int,
    train_version: int = 0,
    groups: int = 1,
    response_len: int = 6,
    *,
    micro_batch: int = 0,
    final: bool = True,
) -> Batch:
    """A micro-batch of `groups` small groups, like those of the micro-batches before it."""
    assembly = PullAssembly("r", Revisions(), 0.0)
    made = [arrays_for(f"s{step}g{i}", response_len=response_len) for i in range(groups * (micro_batch + 1))]
    now, earlier = made[groups * micro_batch :], made[: groups * micro_batch]
    for message in pull_messages(
        now, step=step, train_version=train_version, micro_batch=micro_batch, final=final, earlier=earlier
    ):
        assembly.add(message)
    return assembly.finish()


class Shelf:
    """The pullers' source: places below `ready` can be pulled, first micro-batches for no version below the published
    one.
    """

    def __init__(self, ready: int = 1 << 30, micro_batches: int = 1) -> None:
        self.ready = PullKey(ready)
        self.micro_batches = micro_batches
        """Micro-batches of each step."""
        self.published_version = 0
        self.pulls: list[tuple[int, int]] = []
        """(step, train_version) of every pull that gave a step's first micro-batch, in order."""
        self.given: list[PullKey] = []
        """Every micro-batch that was given, in order."""
        self.attempts: list[tuple[PullKey, int | None]] = []
        self.pending = 1
        self.failure: Exception | None = None
        self.make: Callable[[int, int], Batch] = batch_of
        self.changed = threading.Condition()

    def pull(self, pull_key: PullKey, train_version: int | None, within: Deadline) -> Batch:
        with self.changed:
            self.attempts.append((pull_key, train_version))
            self.changed.notify_all()
            if self.failure is not None:
                raise self.failure
            if train_version is not None and train_version < self.published_version:
                raise InvalidField("train_version", train_version, f"at least {self.published_version}")
            if not self.changed.wait_for(lambda: pull_key < self.ready, min(within.left_s(), 0.02)):
                raise BatchNotReady(
                    step=pull_key.step,
                    queued_groups=0,
                    needed_groups=1,
                    leased=0,
                    pending=self.pending,
                    waits_on="the workers",
                )
            if train_version is not None:
                self.pulls.append((pull_key.step, train_version))
            version = dict(self.pulls)[pull_key.step]
            self.given.append(pull_key)
            self.changed.notify_all()
            if self.micro_batches == 1:
                return self.make(pull_key.step, version)
            return batch_of(
                pull_key.step,
                version,
                micro_batch=pull_key.micro_batch,
                final=pull_key.micro_batch == self.micro_batches - 1,
            )

    def wait_for_pulls(self, count: int, timeout_s: float = 10) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.given) >= count, timeout_s), self.given
