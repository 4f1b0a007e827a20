"""A puller that is told nothing states the versions that the trainer's own clock would."""

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest

pytest.importorskip("torch")

from trainer_client.dataset import ServiceClock
from trainer_client.session.clock import TrainClock
from trainer_client.state import Resumed, RunState


@dataclass
class Story:
    """A trainer that trains, commits and publishes; what its clock says and what the service has on record."""

    per_publish: int
    start: Resumed
    trainer: TrainClock = field(init=False)
    version: int = field(init=False)
    committed: int = field(init=False)

    def __post_init__(self) -> None:
        self.trainer = TrainClock(self.start.version, self.start.next_step, self.per_publish)
        self.version, self.committed = self.start.version, self.start.next_step

    def look(self) -> RunState:
        return cast(
            "RunState",
            SimpleNamespace(
                policy=SimpleNamespace(batches_per_publish=self.per_publish),
                published=SimpleNamespace(version=self.version),
                committed_steps=self.committed,
            ),
        )

    def train(self, step: int) -> None:
        self.trainer.train()
        self.trainer.hand_out(step)

    def commit(self) -> None:
        self.trainer.train()
        self.committed = self.trainer.handed_out

    def publish(self) -> None:
        self.version += 1
        self.trainer.published(self.version)
        self.committed = self.trainer.handed_out


def start_at(step: int, version: int) -> Resumed:
    return Resumed(term=2, next_step=step, next_unassembled_step=step, version=version, cursor=0, feeder_state=b"")


@pytest.mark.parametrize("per_publish", [1, 2, 3, 5])
@pytest.mark.parametrize("commits", [False, True], ids=["publishes-only", "commits-between"])
@pytest.mark.parametrize("start", [(0, 0), (7, 3)])
def test_a_trainer_on_schedule_is_predicted_exactly(per_publish: int, commits: bool, start: tuple[int, int]) -> None:
    """Checkpoints at any time between publishes change nothing; pulls are up to 4 steps ahead."""
    rng = random.Random(per_publish)
    story = Story(per_publish, start_at(*start))
    clock = ServiceClock(story.look, story.start)
    stated: dict[int, int] = {}
    trained_by: dict[int, int] = {}
    for step in range(start[0], start[0] + 40):
        for ahead in range(step, step + 5):
            stated.setdefault(ahead, clock.train_version(ahead))
            assert clock.train_version(ahead) == stated[ahead]
        story.train(step)
        trained_by[step] = story.version
        if commits and rng.random() < 0.5:
            story.commit()
        if (step - start[0] + 1) % per_publish == 0:
            story.publish()
    assert all(stated[step] == version for step, version in trained_by.items())


@pytest.mark.parametrize("per_publish", [1, 2, 4])
def test_a_trainer_off_schedule_is_followed_as_its_own_clock_does(per_publish: int) -> None:
    """It publishes when it likes, and commits by publishing alone: right after each publish both clocks agree."""
    rng = random.Random(per_publish)
    story = Story(per_publish, start_at(3, 1))
    clock = ServiceClock(story.look, story.start)
    agreed = 0
    for step in range(3, 80):
        story.train(step)
        if rng.random() < 0.4:
            story.publish()
            for ahead in range(step + 1, step + 6):
                own, stated = story.trainer.train_version(ahead), clock.train_version(ahead)
                # Where the count of publishes happens to fit the schedule, it may be one publish ahead of the clock.
                assert own <= stated <= own + 1
                agreed += own == stated
    assert agreed > 20


def test_it_never_states_less_than_what_is_published() -> None:
    story = Story(3, start_at(0, 0))
    clock = ServiceClock(story.look, story.start)
    for _ in range(5):
        story.publish()  # of nothing new, as a rollback does
    assert clock.train_version(0) == 5
    assert clock.train_version(3) == 6
