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
from trainer_client.rounds import Place
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
    step: int, train_version: int = 0, groups: int = 1, response_len: int = 6, *, round_: int = 0, final: bool = True
) -> Batch:
    """A round of `groups` small groups, like those of the rounds before it."""
    assembly = PullAssembly("r", Revisions(), 0.0)
    made = [arrays_for(f"s{step}g{i}", response_len=response_len) for i in range(groups * (round_ + 1))]
    now, earlier = made[groups * round_ :], made[: groups * round_]
    for message in pull_messages(
        now, step=step, train_version=train_version, round_=round_, final=final, earlier=earlier
    ):
        assembly.add(message)
    return assembly.finish()


class Shelf:
    """The pullers' source: places below `ready` can be pulled, first rounds for no version below the published one."""

    def __init__(self, ready: int = 1 << 30, rounds: int = 1) -> None:
        self.ready = Place(ready)
        self.rounds = rounds
        """Rounds of each step."""
        self.published_version = 0
        self.pulls: list[tuple[int, int]] = []
        """(step, train_version) of every pull that gave a step's first round, in order."""
        self.given: list[Place] = []
        """Every round that was given, in order."""
        self.attempts: list[tuple[Place, int | None]] = []
        self.pending = 1
        self.failure: Exception | None = None
        self.make: Callable[[int, int], Batch] = batch_of
        self.changed = threading.Condition()

    def pull(self, place: Place, train_version: int | None, within: Deadline) -> Batch:
        with self.changed:
            self.attempts.append((place, train_version))
            self.changed.notify_all()
            if self.failure is not None:
                raise self.failure
            if train_version is not None and train_version < self.published_version:
                raise InvalidField("train_version", train_version, f"at least {self.published_version}")
            if not self.changed.wait_for(lambda: place < self.ready, min(within.left_s(), 0.02)):
                raise BatchNotReady(
                    step=place.step,
                    queued_groups=0,
                    needed_groups=1,
                    leased=0,
                    pending=self.pending,
                    waits_on="the workers",
                )
            if train_version is not None:
                self.pulls.append((place.step, train_version))
            version = dict(self.pulls)[place.step]
            self.given.append(place)
            self.changed.notify_all()
            if self.rounds == 1:
                return self.make(place.step, version)
            return batch_of(place.step, version, round_=place.round, final=place.round == self.rounds - 1)

    def wait_for_pulls(self, count: int, timeout_s: float = 10) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.given) >= count, timeout_s), self.given
