"""The contract of verifiers' AsyncBatchGenerator: ours on a real service and, where it is installed, the original.

`make test-verifiers-generator` installs the last verifiers that has the class.
"""

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integrations.verifiers_scenes import DEADLINE_S, Original, Ours, original_module, original_path
from tests.support.service import ServiceProcess

ABSENT = pytest.mark.skipif(
    original_path() is None, reason="verifiers 0.1.6 is not there: make test-verifiers-generator"
)
RUNS = itertools.count()


@pytest.fixture
def ours(service: ServiceProcess) -> Iterator[Ours]:
    made = Ours(service, f"run-{next(RUNS)}")
    yield made
    made.close()


@pytest.fixture(params=["ours", pytest.param("original", marks=ABSENT)])
def scene(request: pytest.FixtureRequest) -> Iterator[Any]:
    made: Any = request.getfixturevalue("ours") if request.param == "ours" else Original(original_module())
    generators: list[Any] = []
    make = made.generator

    def generator(*, start: bool = True, **options: Any) -> Any:
        generators.append(make(**options))
        if start:
            generators[-1].start()
        return generators[-1]

    made.generator = generator
    yield made
    for each in generators:
        each.stop()


def test_nothing_is_submitted_before_the_start(scene: Any) -> None:
    generator = scene.generator(start=False)
    with pytest.raises(RuntimeError, match="AsyncBatchGenerator not started"):
        scene.submit(generator, 0)
    assert generator.get_pending_count() == 0


def test_start_and_stop_can_be_repeated_and_stop_ends_the_submitting(scene: Any) -> None:
    generator = scene.generator(start=False)
    generator.stop()
    generator.start()
    generator.start()
    assert scene.submit(generator, 0)
    generator.stop()
    generator.stop()
    with pytest.raises(RuntimeError, match="AsyncBatchGenerator not started"):
        scene.submit(generator, 1)


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, 4),
        ({"num_batches_ahead": 0}, 4),
        ({"num_batches_ahead": 3}, 6),
        ({"max_queue_size": 1}, 1),
        ({"num_batches_ahead": 3, "max_queue_size": 2}, 2),
        ({"max_queue_size": 0}, 4),
    ],
)
def test_queue_takes_twice_the_batches_ahead_or_what_is_said(scene: Any, options: dict[str, int], limit: int) -> None:
    generator = scene.generator(**options)
    assert generator.max_queue_size == limit
    assert [scene.submit(generator, i) for i in range(limit + 1)] == [True] * limit + [False]
    assert generator.get_pending_count() == limit


def test_a_batch_under_way_is_not_submitted_twice(scene: Any) -> None:
    generator = scene.generator(max_queue_size=1)
    assert scene.submit(generator, 3)
    assert scene.submit(generator, 3)
    assert generator.get_pending_count() == 1
    scene.release(3)
    assert generator.get_batch(3).batch_id == 3
    with pytest.raises(TimeoutError):
        generator.get_batch(3, timeout=0.2)


def test_room_is_made_by_collecting_and_not_by_generating(scene: Any) -> None:
    generator = scene.generator(max_queue_size=1)
    scene.submit(generator, 0)
    scene.release(0)
    scene.until_generated(generator, 1)
    assert not scene.submit(generator, 1)
    generator.get_batch(0)
    assert generator.get_pending_count() == 0
    assert scene.submit(generator, 1)


def test_batches_are_collected_in_any_order(scene: Any) -> None:
    generator = scene.generator(num_batches_ahead=3)
    for i in range(4):
        scene.submit(generator, i)
        scene.release(i)
        scene.until_generated(generator, i + 1)
    assert generator.get_batch(2).batch_id == 2
    assert generator.get_pending_count() == 1
    assert [generator.get_batch(i, timeout=0.001).batch_id for i in (1, 0)] == [1, 0]
    assert generator.get_batch(3).batch_id == 3


def test_get_batch_waits_for_the_generation(scene: Any) -> None:
    generator = scene.generator()
    scene.submit(generator, 0)
    got: list[int] = []
    waiting = threading.Thread(target=lambda: got.append(generator.get_batch(0).batch_id))
    waiting.start()
    assert not got
    scene.release(0)
    waiting.join(DEADLINE_S)
    assert got == [0]


@pytest.mark.parametrize("submitted", [True, False])
def test_waiting_ends_with_the_timeout(scene: Any, submitted: bool) -> None:
    generator = scene.generator(generation_timeout=0.3)
    if submitted:
        scene.submit(generator, 7)
    for timeout, said in ((None, "0.3"), (0, "0.3"), (0.2, "0.2")):
        started = time.monotonic()
        with pytest.raises(TimeoutError, match=f"Batch 7 generation timed out after {said}s"):
            generator.get_batch(7, timeout)
        assert time.monotonic() - started >= float(said)
    # It was late, not lost.
    scene.submit(generator, 7)
    scene.release(7)
    assert generator.get_batch(7, timeout=DEADLINE_S).batch_id == 7


def test_generation_times_are_averaged(scene: Any) -> None:
    generator = scene.generator()
    assert generator.get_average_generation_time() == 0.0
    results = []
    for i in range(3):
        scene.submit(generator, i)
        scene.release(i)
        results.append(generator.get_batch(i))
    times = [result.generation_time for result in results]
    assert all(taken > 0 for taken in times)
    assert generator.get_average_generation_time() == pytest.approx(sum(times) / 3)
    generator.generation_times.extend(itertools.repeat(2.5, 100))
    assert generator.get_average_generation_time() == 2.5


def test_more_is_wanted_until_enough_batches_are_ahead(scene: Any) -> None:
    generator = scene.generator(num_batches_ahead=2)
    wanted = []
    for i in range(2):
        wanted.append(generator.should_submit_more())
        scene.submit(generator, i)
    wanted.append(generator.should_submit_more())
    for i in (0, 1):
        scene.release(i)
        scene.until_generated(generator, i + 1)
    wanted.append(generator.should_submit_more())
    generator.get_batch(1)
    wanted.append(generator.should_submit_more())
    generator.get_batch(0)
    assert wanted == [True, True, False, False, True]


def test_without_batches_ahead_none_are_wanted(scene: Any) -> None:
    generator = scene.generator(num_batches_ahead=0)
    assert not generator.should_submit_more()
    assert scene.submit(generator, 0)
    scene.release(0)
    assert generator.get_batch(0).batch_id == 0


def test_a_collected_batch_can_be_submitted_again(scene: Any) -> None:
    generator = scene.generator()
    for _ in range(2):
        scene.submit(generator, 0)
        scene.release(0)
        assert generator.get_batch(0).batch_id == 0
