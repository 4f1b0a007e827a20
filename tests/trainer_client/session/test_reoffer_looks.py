"""Tests of when a session repeats a broadcast: what the run has to show, how often it looks, and what becomes of the
clock.
"""

import threading
from typing import Any, cast

import pytest

from buffer_wire.errors import BatchNotReady, StaleTerm
from buffer_wire.status import ServiceUnreachable
from tests.trainer_client.publish.test_collective_members import engine
from tests.trainer_client.stand_ins import Shelf
from trainer_client import Policy, Resumed, RunState, WeightVersion
from trainer_client.client.pulling import PullLoop
from trainer_client.micro_batches import PullKey
from trainer_client.session.clock import TrainClock
from trainer_client.session.publishing import Repeater, engines_without_weights
from trainer_client.session.pulls.prefetch import Prefetcher
from trainer_client.session.pulls.puller import Puller, PullSource

START = Resumed(term=3, next_step=0, next_unassembled_step=0, version=4, cursor=0, feeder_state=b"")


def run_of(*engines: Any, **changes: Any) -> RunState:
    known: dict[str, Any] = {
        "term": 3, "published": WeightVersion(3, 9), "paused": "", "draining": False, "engines": engines,
        "policy": Policy(max_staleness=2),
    }  # fmt: skip

    class Seen:
        pass

    for name, value in (known | changes).items():
        setattr(Seen, name, value)
    return cast("RunState", Seen)


def at(version: int, state: str = "ready", term: int = 3, **changes: Any) -> Any:
    return engine(f"{state}{version}", loaded=WeightVersion(term, version), state=state, **changes)


@pytest.mark.parametrize(
    ("run", "waiting"),
    [
        (run_of(), ()),
        (run_of(at(0, "loading")), ("loading0",)),
        (run_of(at(0, "loading"), at(9)), ()),
        # It generates with what it has, which the policy lets pass.
        (run_of(at(0, "loading"), at(7)), ()),
        (run_of(at(0, "loading"), at(6)), ("loading0", "ready6")),
        (run_of(at(0, "loading"), at(0), policy=Policy()), ()),
        # It holds the version and goes on in a moment.
        (run_of(at(0, "loading"), at(9, "loading")), ()),
        (run_of(at(8, "loading")), ("loading8",)),
        # Nobody who could take part in a broadcast yet.
        (run_of(at(0, "starting")), ()),
        (run_of(at(9, "quarantined")), ()),
        (run_of(at(0, "loading"), at(9, silent_ms=60_000), at(9, "stopped")), ("loading0",)),
        # A number of an abandoned timeline says nothing: it counts as the resume's version, 4.
        (run_of(at(20, term=2)), ("ready20",)),
        (run_of(at(20, term=2), published=WeightVersion(3, 6)), ()),
        (run_of(at(0, "loading"), paused="operator"), ()),
        (run_of(at(0, "loading"), draining=True), ()),
        (run_of(at(0, "loading"), term=4), ()),
    ],
)
def test_engines_wait_where_none_is_fresh_enough(run: RunState, waiting: tuple[str, ...]) -> None:
    assert engines_without_weights(run, START) == waiting


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Scene:
    """A trainer that waits, as a repeater sees it."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.looks: list[RunState | Exception] = []
        self.repeated = 0
        self.able = True
        self.repeater = Repeater(self._look, lambda: self.able, self._repeat, START, clock=self.clock)
        self.repeater.begin()

    def _look(self, timeout_s: float) -> RunState:
        found = self.looks.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def _repeat(self) -> None:
        self.repeated += 1

    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.repeater(
            BatchNotReady(step=1, queued_groups=0, needed_groups=2, leased=0, pending=9, waits_on="the workers")
        )


def test_two_looks_in_a_row_have_to_find_it() -> None:
    stuck, fine, scene = run_of(at(0, "loading")), run_of(at(9)), Scene()
    scene.looks = [stuck, fine, stuck, run_of(at(0, "loading"), published=WeightVersion(3, 10)), stuck, stuck]
    counts = []
    for _ in range(6):
        scene.wait(5.0)
        counts.append(scene.repeated)
    # Neither one look, nor two with a serving engine between them, nor two of different versions are enough.
    assert counts == [0, 0, 0, 0, 0, 1]
    assert scene.looks == []


def test_looks_keep_their_distance_also_from_the_beginning_of_the_wait() -> None:
    scene = Scene()
    scene.looks = [run_of(at(0, "loading"))] * 2
    for _ in range(4):
        scene.wait(2.0)
    assert len(scene.looks) == 1
    scene.repeater.begin()
    scene.wait(4.9)
    assert len(scene.looks) == 1
    scene.wait(0.1)
    # The wait is another one: what was seen in the last one does not count.
    assert (scene.looks, scene.repeated) == ([], 0)


def test_it_does_not_look_where_nothing_can_be_repeated_or_something_else_is_wrong() -> None:
    scene = Scene()
    scene.able = False
    scene.wait(50.0)
    scene.able = True
    scene.clock.now += 50.0
    scene.repeater(ServiceUnreachable("gone", status="UNAVAILABLE"))
    assert scene.repeated == 0


def test_a_look_that_fails_is_made_again_later_unless_the_trainer_is_fenced() -> None:
    scene = Scene()
    scene.looks = [ServiceUnreachable("gone", status="UNAVAILABLE"), *[run_of(at(0, "loading"))] * 2, StaleTerm(3, 4)]
    for _ in range(3):
        scene.wait(5.0)
    assert scene.repeated == 1
    with pytest.raises(StaleTerm):
        scene.wait(5.0)


def test_both_ways_of_pulling_call_it_in_the_trainers_thread() -> None:
    shelf = Shelf(ready=0)
    threads: list[threading.Thread] = []

    def while_waiting(error: Exception) -> None:
        assert isinstance(error, BatchNotReady)
        threads.append(threading.current_thread())
        shelf.ready = PullKey(5)

    source = PullSource(
        pull=shelf.pull, published=lambda: 0, exhausted=lambda: False, check=lambda: None, loop=PullLoop("s"),
        while_waiting=while_waiting,
    )  # fmt: skip
    puller = Puller(source, TrainClock(0, 0, 1), 20)
    assert puller.take(PullKey(0)) is not None
    shelf.ready = PullKey(1)
    ahead = Prefetcher(source, TrainClock(0, 1, 1), 20, prefetch=1, max_bytes=1 << 20)
    assert ahead.take(PullKey(1)) is not None
    ahead.stop()
    assert set(threads) == {threading.current_thread()}
    assert len(threads) >= 2


def test_a_repetition_leaves_the_cadence_of_publishes_as_it_is() -> None:
    # One publish after every second step: after steps 1, 3, 5.
    clock = TrainClock(0, 0, 2)
    for step in range(2):
        clock.hand_out(step)
    clock.published(1)
    clock.hand_out(2)
    clock.train()
    clock.correct(2)  # repeated while the trainer waits for step 3
    assert clock.train_version(3) == 2
    clock.hand_out(3)
    # Step 4 is pulled ahead while step 3 is trained, after which the next publish comes.
    assert clock.train_version(4) == 3
    clock.published(3)
    assert clock.train_version(4) == 3
