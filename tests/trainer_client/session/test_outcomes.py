"""Outcomes: every group once, by its first end, whatever was killed; and the state of the iterable knows which."""

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import pytest

from buffer_wire.errors import InvalidField
from rollout_buffer.v1 import runs_pb2 as pb
from tests.trainer_client.session.test_feeder import feeder_of, wait_for_failure
from tests.trainer_client.stand_ins import Inbox
from trainer_client import SamplingParams, Task
from trainer_client.session.outcomes import Outcomes, Position

pytestmark = pytest.mark.matrix


class Recording:
    """Events of a run, as the service hands them over."""

    def __init__(self) -> None:
        self.events: list[pb.Record] = []

    def add(self, **event: object) -> None:
        self.events.append(pb.Record(event_id=f"{len(self.events) + 1}-0", **event))  # type: ignore[arg-type]

    def new(self, *names: str) -> None:
        for name in names:
            self.add(submitted=pb.TaskSubmitted(task_id=name, metadata_json=json.dumps({"name": name})))

    def accept(self, group_id: str, *rewards: float, state: str = "queued") -> None:
        self.add(accepted=pb.GroupAccepted(group_id=group_id, rewards=rewards, state=state))

    def move(self, group_id: str, state: str) -> None:
        self.add(moved=pb.GroupMoved(group_id=group_id, state=state))

    def close(self, step: int, *group_ids: str) -> None:
        self.add(micro_batch=pb.MicroBatchClosed(step=step, group_ids=group_ids))

    def train(self, steps: int) -> None:
        self.add(trained=pb.StepsTrained(committed_steps=steps))

    def read(self, after: str, enough: int) -> Sequence[pb.Record]:
        first = int(after.partition("-")[0]) if after else 0
        return self.events[first : first + enough]


class Heard:
    """Iterable whose state is what was reported to it."""

    def __init__(self, tasks: Sequence[Task] = ()) -> None:
        self.tasks = tasks
        self.heard: list[tuple[str, object, list[float], str]] = []
        self.drawn = 0

    def __iter__(self) -> Iterator[Task]:
        for task in self.tasks[self.drawn :]:
            self.drawn += 1
            yield task

    def report(self, task_id: str, metadata: Mapping[str, object], rewards: Sequence[float], disposition: str) -> None:
        self.heard.append((task_id, metadata.get("name"), list(rewards), disposition))

    def state(self) -> bytes:
        return json.dumps([self.drawn, self.heard]).encode()

    def load_state(self, state: bytes) -> None:
        self.drawn, heard = json.loads(state)
        self.heard = [tuple(each) for each in heard]


def of_a_run() -> Recording:
    """A bit of everything."""
    recording = Recording()
    recording.new("a", "b", "c", "d", "e")
    recording.accept("a/0", 0.0, 0.0, state="filtered")
    recording.accept("b/0", 1.0, 0.0)
    recording.accept("c/0", 1.0, 1.0)
    recording.accept("d/0", 0.0, 1.0)
    recording.move("d/0", "recycled")
    recording.add(failed=pb.TaskFailed(group_id="e/0", error="no such tool"))
    recording.accept("own/0", 1.0, 0.0)
    recording.close(0, "b/0", "c/0")
    recording.move("own/0", "dropped_overflow")
    recording.train(1)
    recording.accept("d/1", 1.0, 0.5)
    recording.close(1, "d/1")
    recording.train(2)
    return recording


ALL = [
    ("a", "a", [0.0, 0.0], "filtered"),
    ("d", "d", [0.0, 1.0], "recycled"),
    ("e", "e", [], "failed"),
    ("own", None, [1.0, 0.0], "dropped_overflow"),
    ("b", "b", [1.0, 0.0], "trained"),
    ("c", "c", [1.0, 1.0], "trained"),
    ("d", "d", [1.0, 0.5], "trained"),
]


def test_every_group_is_reported_once_with_its_tasks_metadata() -> None:
    recording, tasks = of_a_run(), Heard()
    outcomes = Outcomes(tasks, Position())
    assert outcomes.follow(recording.read)
    assert tasks.heard == ALL
    assert not outcomes.follow(recording.read)
    assert (outcomes.tally.groups, outcomes.tally.all_right, outcomes.tally.all_wrong) == (6, 1, 1)


@pytest.mark.parametrize("kept_at", range(20))
def test_whatever_is_killed_a_state_hears_each_outcome_once(kept_at: int) -> None:
    """One more is reported after the state was kept, and dies with the process."""
    recording, first = of_a_run(), Heard()
    outcomes = Outcomes(first, Position())
    whole, recording.events = recording.events, recording.events[:kept_at]
    outcomes.follow(recording.read)
    kept = outcomes.position.wrap(first.state())
    recording.events = whole[: kept_at + 2]
    outcomes.follow(recording.read)

    recording.events, second = whole, Heard()
    position, state = Position.unwrap(kept)
    second.load_state(state)
    Outcomes(second, position).follow(recording.read)
    assert second.heard == ALL


def test_what_a_resume_takes_back_is_not_reported_again() -> None:
    recording, tasks = Recording(), Heard()
    recording.new("a", "b")
    recording.accept("a/0", 1.0)
    recording.accept("b/0", 1.0)
    recording.close(0, "a/0")
    recording.close(1, "b/0")
    recording.train(1)
    for group in ("a/0", "b/0"):  # a trainer of an older checkpoint, with mode "requeue"
        recording.move(group, "queued")
    recording.train(1)  # another step 0
    recording.close(1, "a/0")
    recording.move("b/0", "dropped_stale")
    recording.train(2)
    Outcomes(tasks, Position()).follow(recording.read)
    assert [(each[0], each[3]) for each in tasks.heard] == [("a", "trained"), ("b", "dropped_stale")]


def test_rewards_are_those_that_a_stage_has_written() -> None:
    recording, tasks = Recording(), Heard()
    recording.new("a")
    recording.accept("a/0", 0.0, 0.0)
    recording.add(rewarded=pb.GroupRewarded(group_id="a/0", rewards=[1.0, 1.0]))
    recording.move("a/0", "filtered")
    Outcomes(tasks, Position()).follow(recording.read)
    assert tasks.heard == [("a", "a", [1.0, 1.0], "filtered")]


def test_rewards_of_rows_are_those_of_their_trajectories() -> None:
    recording, tasks = Recording(), Heard()
    recording.new("a", "b")
    recording.add(accepted=pb.GroupAccepted(group_id="a/0", rewards=[0, 1, 1], trajectory_rewards=[0.5, 1]))
    recording.move("a/0", "rejected")
    recording.accept("b/0", 0.0, 0.0, 0.0)
    recording.add(rewarded=pb.GroupRewarded(group_id="b/0", rewards=[1, 1, 0], trajectory_rewards=[1, 0]))
    recording.move("b/0", "filtered")
    Outcomes(tasks, Position()).follow(recording.read)
    assert [(each[0], each[2]) for each in tasks.heard] == [("a", [0.5, 1.0]), ("b", [1.0, 0.0])]


def test_a_random_run_killed_at_random_moments_hears_each_group_once() -> None:
    rng = random.Random(7)
    for _ in range(30):
        recording, ends = Recording(), Counter[str]()
        queued: list[str] = []
        step = 0
        for number in range(40):
            if rng.random() < 0.8:
                recording.new(f"t{number}")
            state = rng.choice(["queued", "queued", "filtered"])
            recording.accept(f"t{number}/0", rng.random(), state=state)
            ends[f"t{number}"] += 1
            queued += [f"t{number}/0"] if state == "queued" else []
            if len(queued) >= 4:
                rng.shuffle(queued)
                recording.move(queued.pop(), "dropped_stale")
                recording.close(step, *queued[:2])
                queued = queued[2:]
                step += 1
                if rng.random() < 0.5:
                    recording.train(step)
        recording.train(step)
        for group in queued:
            recording.move(group, "discarded")
        whole, kept, tasks = recording.events, b"", Heard()
        for end in [*sorted(rng.sample(range(len(whole)), 5)), len(whole)]:
            tasks = Heard()
            position, its = Position.unwrap(kept)
            if its:
                tasks.load_state(its)
            outcomes = Outcomes(tasks, position)
            recording.events = whole[:end]
            outcomes.follow(recording.read)
            if rng.random() < 0.6:
                kept = outcomes.position.wrap(tasks.state())
        assert Counter(each[0] for each in tasks.heard) == ends


def task(name: str, metadata: Mapping[str, object] | None = None) -> Task:
    sampling = SamplingParams(max_new_tokens=1)
    return Task(task_id=name, group_size=1, sampling=sampling, prompt_token_ids=[1], metadata=metadata or {})


class Reporting(Inbox, Recording):
    """The service, with a recording."""

    def __init__(self) -> None:
        Inbox.__init__(self)
        Recording.__init__(self)

    records = Recording.read


def test_the_feeder_keeps_what_was_reported_with_the_tasks_or_without_any() -> None:
    inbox, tasks = Reporting(), Heard([task("a"), task("b")])
    feeder = feeder_of(tasks, inbox)
    feeder.start()
    inbox.take(2)
    inbox.wait_until(lambda inbox: inbox.cursor == 2)
    inbox.new("a", "b")
    inbox.accept("a/0", 1.0, state="filtered")
    inbox.wait_until(lambda inbox: b"filtered" in inbox.feeder_state)
    inbox.accept("b/0", 0.0, state="filtered")
    feeder.stop()
    feeder.raise_if_failed()
    position, state = Position.unwrap(inbox.feeder_state)
    assert json.loads(state) == [2, [["a", "a", [1.0], "filtered"], ["b", "b", [0.0], "filtered"]]]
    assert position == Position("4-0", "4-0")
    assert feeder.tally is not None
    assert (feeder.tally.all_right, feeder.tally.all_wrong) == (1, 1)

    later = Heard([task("a"), task("b"), task("c")])
    feeder = feeder_of(later, inbox, state=inbox.feeder_state)
    feeder.start()
    assert inbox.take(1) == ["c"]
    feeder.stop()
    assert [each[0] for each in later.heard] == ["a", "b"]


def test_an_error_of_report_surfaces_in_the_trainer() -> None:
    class Broken(Heard):
        def report(self, *_: object) -> None:
            raise KeyError("index")

    inbox = Reporting()
    inbox.accept("a/0", 1.0, state="filtered")
    feeder = feeder_of(Broken([task("a")]), inbox)
    feeder.start()
    wait_for_failure(feeder)
    with pytest.raises(KeyError, match="index"):
        feeder.raise_if_failed()
    assert inbox.feeder_state == b""


def test_metadata_that_no_recording_keeps_is_refused() -> None:
    inbox = Reporting()
    feeder = feeder_of(Heard([task("a", {"text": "x" * 1024})]), inbox)
    feeder.start()
    wait_for_failure(feeder)
    with pytest.raises(InvalidField, match=r"tasks\[0\].metadata is '1035 bytes'"):
        feeder.raise_if_failed()


def test_an_iterable_that_could_not_be_put_back_is_refused() -> None:
    class Forgetful:
        report = Heard.report

    with pytest.raises(InvalidField, match=r"state\(\) and load_state\(\)"):
        feeder_of(Forgetful(), Inbox())
