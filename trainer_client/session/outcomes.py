"""Outcomes of groups, from the run's recording to the iterable of tasks.

    class Curriculum:
        def report(self, task_id, metadata, rewards, disposition): ...
        def state(self) -> bytes: ...
        def load_state(self, state): ...

Invariants: every accepted group, and every failed task, is reported once, by its first end, in the order of the ends.
The position in the recording is kept in the feeder's state, so the service writes it together with what `state`
returned and with the tasks. So a state that `load_state` gets has heard exactly the outcomes up to its position. The
next report is the one after, whatever was killed meanwhile.

Events of a run that waits for longer than the newest million are gone: their groups are not reported.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, TypeGuard

from buffer_wire.errors import InvalidField
from buffer_wire.limits import MAX_RECORDED_METADATA_BYTES
from rollout_buffer.v1 import runs_pb2 as pb
from trainer_client.tasks import Task, tasks_to_wire

_MARK = b"rollout-buffer reports "

AGAIN = frozenset({"recycled", "lost"})
"""Dispositions after which the task is started anew, as the next incarnation."""

MANY = 10_000
"""Events that are read in one call."""

ReadRecords: TypeAlias = Callable[[str, int], Sequence[pb.Record]]
"""Callable that reads events after one of them ("": from the first), in order, to the end or until it has so many."""


class ReportedTasks(Protocol):
    """Iterable of tasks that hears what became of them, with the state of `StatefulTasks`."""

    def report(self, task_id: str, metadata: Mapping[str, object], rewards: Sequence[float], disposition: str) -> None:
        """Take the outcome of a group, between two draws of tasks and in the feeder's thread.

        `metadata`: the task's; {} for one that no feeder submitted. `rewards`: one for each sample, () for "failed".
        Where samples are rows of trajectories, or not all are trained on: one for each trajectory, as
        GroupFacts.trajectory_rewards.
        `disposition`: "trained", "filtered", another entry of the ledger, or "failed". After "recycled" and "lost" the
        task is started anew, so a further group of it is reported. What it raises ends the feeding.
        """


Ended: TypeAlias = tuple[str, Sequence[float], str]
"""Task id, rewards and disposition of a group that has ended."""


@dataclass(frozen=True, slots=True)
class Position:
    """Position in a recording, as ids of events."""

    after: str = ""
    """Event after which everything is that some open task needs."""
    reported: str = ""
    """Event through which every outcome is reported."""

    def wrap(self, state: bytes) -> bytes:
        """Return the feeder's state with this position before the iterable's `state`."""
        return b"%s%s %s\n%s" % (_MARK, self.after.encode(), self.reported.encode(), state)

    @classmethod
    def unwrap(cls, feeder_state: bytes) -> tuple["Position", bytes]:
        """Split what `wrap` made; a state without a position is the iterable's alone."""
        if not feeder_state.startswith(_MARK):
            return cls(), feeder_state
        line, _, state = feeder_state[len(_MARK) :].partition(b"\n")
        after, reported = line.decode().split(" ")
        return cls(after, reported), state


@dataclass(slots=True)
class Tally:
    """Numbers of reported groups, over the session."""

    groups: int = 0
    """Groups with rewards."""
    all_right: int = 0
    """Those whose rewards are equal and above 0."""
    all_wrong: int = 0
    """Those whose rewards are equal and at most 0."""

    def add(self, rewards: Sequence[float]) -> None:
        """Count a group; a failed task has no rewards and is none."""
        if rewards:
            equal = min(rewards) == max(rewards)
            self.groups += 1
            self.all_right += equal and rewards[0] > 0
            self.all_wrong += equal and rewards[0] <= 0


@dataclass(slots=True)
class _Open:
    """Task of which something is to come."""

    before: str
    """Event before its first one."""
    metadata: Mapping[str, object] = field(default_factory=dict)
    rewards: Sequence[float] | None = None
    """Rewards of its group; None while it has none."""
    step: int | None = None


class Outcomes:
    """Outcomes that are reported to `tasks`, from a position of the recording on."""

    def __init__(self, tasks: ReportedTasks, position: Position) -> None:
        self._report = tasks.report
        self._reported = position.reported
        self._read = position.after
        self._open: dict[str, _Open] = {}
        """Open tasks by id, in the order of their first events."""
        self.tally = Tally()

    @property
    def position(self) -> Position:
        """Position that belongs to the iterable's state now."""
        first = next(iter(self._open.values()), None)
        return Position(self._read if first is None else first.before, self._reported)

    def follow(self, read: ReadRecords) -> bool:
        """Report what has ended since the last call. Returns whether anything was reported.

        Raises what `read` and the iterable's `report` raise. The next call goes on after the last whole event.
        """
        before, records = self._reported, read(self._read, MANY)
        while records:
            for record in records:
                self._take(record)
            records = read(self._read, MANY) if len(records) >= MANY else ()
        return self._reported != before

    def _take(self, record: pb.Record) -> None:
        is_new = _place(record.event_id) > _place(self._reported)
        ended = False
        for task_id, rewards, disposition in self._ends(record):
            task = self._open.get(task_id) or _Open("")
            if is_new:
                self._report(task_id, task.metadata, rewards, disposition)
                self.tally.add(rewards)
                ended = True
            self._close(task_id, disposition)
        self._read = record.event_id
        if ended:
            self._reported = record.event_id

    def _ends(self, record: pb.Record) -> Iterator[Ended]:
        """Take an event into account; yield each group that it ends."""
        kind = record.WhichOneof("event")
        if kind == "submitted":
            self._open[record.submitted.task_id] = _Open(self._read, json.loads(record.submitted.metadata_json))
        elif kind == "accepted":
            yield from self._accepted(record.accepted)
        elif kind == "rewarded":
            if (written := self._open.get(_task_of(record.rewarded.group_id))) is not None:
                written.rewards = _rewards_of(record.rewarded)
        elif kind == "moved":
            yield from self._moved(record.moved)
        elif kind == "micro_batch":
            for task in filter(None, map(self._open.get, map(_task_of, record.micro_batch.group_ids))):
                task.step = record.micro_batch.step
        elif kind == "trained":
            yield from self._trained(record.trained.committed_steps)
        elif kind == "failed":
            yield _task_of(record.failed.group_id), (), "failed"

    def _accepted(self, accepted: pb.GroupAccepted) -> Iterator[Ended]:
        task_id = _task_of(accepted.group_id)
        task = self._open.setdefault(task_id, _Open(self._read))
        task.rewards, task.step = _rewards_of(accepted), None
        if accepted.state == "filtered":
            yield task_id, task.rewards, "filtered"

    def _trained(self, steps: int) -> Iterator[Ended]:
        for task_id, task in list(self._open.items()):
            if task.rewards is not None and task.step is not None and task.step < steps:
                yield task_id, task.rewards, "trained"

    def _moved(self, moved: pb.GroupMoved) -> Iterator[Ended]:
        task_id = _task_of(moved.group_id)
        task = self._open.get(task_id)
        # Without rewards it was reported before: a resume took back what was trained.
        if task is None or task.rewards is None:
            return
        if moved.state == "queued":
            task.step = None
        else:
            yield task_id, task.rewards, moved.state

    def _close(self, task_id: str, disposition: str) -> None:
        task = self._open.get(task_id)
        if task is not None and disposition in AGAIN and task.metadata:
            task.rewards, task.step = None, None
        else:
            self._open.pop(task_id, None)


def reported(tasks: object) -> TypeGuard[ReportedTasks]:
    """True when the iterable hears of outcomes. Raises InvalidField for one that could not be put back."""
    if not hasattr(tasks, "report"):
        return False
    if not (hasattr(tasks, "state") and hasattr(tasks, "load_state")):
        raise InvalidField("tasks", type(tasks).__name__, "one with state() and load_state(), because it has report()")
    return True


def check_metadata(tasks: Sequence[Task]) -> None:
    """Raise InvalidField for a task whose metadata is too large to be kept for its report, or that is no task."""
    for index, task in enumerate(tasks_to_wire(tasks)):
        size = len(task.metadata_json.encode())
        if size > MAX_RECORDED_METADATA_BYTES:
            limit = f"at most {MAX_RECORDED_METADATA_BYTES} bytes as JSON, where the iterable has report()"
            raise InvalidField(f"tasks[{index}].metadata", f"{size} bytes", limit)


def _rewards_of(event: pb.GroupAccepted | pb.GroupRewarded) -> Sequence[float]:
    return tuple(event.trajectory_rewards or event.rewards)


def _task_of(group_id: str) -> str:
    return group_id.rpartition("/")[0]


def _place(event_id: str) -> tuple[int, ...]:
    return tuple(map(int, event_id.split("-"))) if event_id else ()
