"""The contract of verifiers' AsyncBatchGenerator, for ours and, where an old verifiers is installed, for the original.

What generates is scripted by the test: a batch is generated when `scene.release` says so.
"""

import asyncio
import importlib.util
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.integrations.verifiers_run import Characters, InMemoryRun
from trainer_client.integrations import verifiers as ours

DEADLINE_S = 20.0
SAMPLING = {"temperature": 1.0, "max_tokens": 16, "n": 1, "logprobs": True, "extra_body": {"top_k": -1, "min_p": 0.0}}


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.005)


class Ours:
    """Our generator over a run in memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run = InMemoryRun()
        monkeypatch.setattr("trainer_client.integrations.verifiers_generator.AsyncBufferClient", self.run.client)

    def generator(self, **options: Any) -> Any:
        config = {"base_url": "nowhere", "run_id": "r"}
        return ours.AsyncBatchGenerator(None, config, "model", SAMPLING, **options)

    def request(self, batch_id: int) -> Any:
        inputs = {"prompt": [f"prompt {batch_id}"] * 2, "answer": [str(batch_id)] * 2}
        return ours.BatchRequest(batch_id=batch_id, env_inputs=inputs, processing_class=Characters())

    def release(self, batch_id: int) -> None:
        self.run.generate(lambda task: task.metadata["answer"] == str(batch_id))


class Original:
    """The class of verifiers over an environment in memory."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.released: set[str] = set()

    def generator(self, **options: Any) -> Any:
        config = {"base_url": "http://nowhere", "api_key": "x"}
        config["http_client_args"] = {"limits": {"max_connections": 1}, "timeout": 1.0}  # type: ignore[assignment]
        return self.module.AsyncBatchGenerator(self, config, "model", SAMPLING, **options)

    def request(self, batch_id: int) -> Any:
        return self.module.BatchRequest(
            batch_id=batch_id,
            env_inputs={"prompt": [f"prompt {batch_id}"] * 2, "answer": [str(batch_id)] * 2},
            processing_class=None,
            mask_env_responses=False,
            max_seq_len=-1,
            mask_truncated_completions=False,
            zero_truncated_completions=False,
            max_concurrent=1,
        )

    def release(self, batch_id: int) -> None:
        self.released.add(str(batch_id))

    async def a_generate(self, inputs: dict[str, list[str]], **_: Any) -> SimpleNamespace:
        while inputs["answer"][0] not in self.released:  # noqa: ASYNC110 - another thread releases
            await asyncio.sleep(0.005)
        prompts = inputs["prompt"]
        return SimpleNamespace(prompt=prompts, completion=["x", "x"], state=[], reward=[0.0, 1.0], metrics={})

    def process_env_results_vllm(self, prompts: list[str], **_: Any) -> Any:
        types = sys.modules["verifiers.types"]
        return types.ProcessedOutputs(
            prompt_ids=[[ord(char) for char in prompt] for prompt in prompts],
            prompt_mask=[[0] * len(prompt) for prompt in prompts],
            completion_ids=[[1], [1]],
            completion_mask=[[1], [1]],
            completion_logprobs=[[0.0], [0.0]],
            rewards=[0.0, 1.0],
        )


def original_path(name: str) -> Path | None:
    """Where a module of verifiers 0.1.2 to 0.1.6 is installed."""
    found = importlib.util.find_spec("verifiers")
    path = Path(found.origin or "").parent / "trainers" / f"{name}.py" if found is not None else Path()
    return path if path.is_file() else None


def original_module(name: str) -> ModuleType:
    """The module, loaded by its path: the package around it wants accelerators."""
    path = original_path(name)
    assert path is not None
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


IMPLEMENTATIONS = ["ours", *(["original"] if original_path("async_batch_generator") is not None else [])]


@pytest.fixture(params=IMPLEMENTATIONS)
def scene(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if request.param == "ours":
        made: Any = Ours(monkeypatch)
    else:
        made = Original(original_module("async_batch_generator"))
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


def until_generated(generator: Any, batches: int) -> None:
    until(lambda: len(generator.generation_times) == batches, f"{batches} batches to be generated")


def test_nothing_is_submitted_before_the_start(scene: Any) -> None:
    generator = scene.generator(start=False)
    with pytest.raises(RuntimeError, match="AsyncBatchGenerator not started"):
        generator.submit_batch(scene.request(0))
    assert generator.get_pending_count() == 0


def test_start_and_stop_can_be_repeated(scene: Any) -> None:
    generator = scene.generator(start=False)
    generator.stop()
    generator.start()
    thread = generator.worker_thread
    generator.start()
    assert (generator.worker_thread is thread, thread.name, thread.daemon) == (True, "AsyncBatchGenerator", True)
    generator.stop()
    generator.stop()
    assert not thread.is_alive()
    assert not generator.started


def test_stop_ends_the_submitting(scene: Any) -> None:
    generator = scene.generator()
    generator.stop()
    with pytest.raises(RuntimeError, match="AsyncBatchGenerator not started"):
        generator.submit_batch(scene.request(0))


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, 4),
        ({"num_batches_ahead": 0}, 4),
        ({"num_batches_ahead": 2}, 4),
        ({"num_batches_ahead": 3}, 6),
        ({"max_queue_size": 1}, 1),
        ({"num_batches_ahead": 3, "max_queue_size": 2}, 2),
        ({"max_queue_size": 0}, 4),
    ],
)
def test_queue_takes_twice_the_batches_ahead_or_what_is_said(scene: Any, options: dict[str, int], limit: int) -> None:
    generator = scene.generator(**options)
    assert generator.max_queue_size == limit
    assert [generator.submit_batch(scene.request(i)) for i in range(limit + 1)] == [True] * limit + [False]
    assert generator.get_pending_count() == limit


def test_a_batch_under_way_is_not_submitted_twice(scene: Any) -> None:
    generator = scene.generator(max_queue_size=1)
    assert generator.submit_batch(scene.request(3))
    assert generator.submit_batch(scene.request(3))
    assert generator.get_pending_count() == 1
    scene.release(3)
    assert generator.get_batch(3).batch_id == 3
    with pytest.raises(TimeoutError):
        generator.get_batch(3, timeout=0.2)


def test_room_is_made_by_collecting_and_not_by_generating(scene: Any) -> None:
    generator = scene.generator(max_queue_size=1)
    generator.submit_batch(scene.request(0))
    scene.release(0)
    until_generated(generator, 1)
    assert not generator.submit_batch(scene.request(1))
    assert (generator.get_pending_count(), generator.get_completed_count()) == (1, 0)
    generator.get_batch(0)
    assert (generator.get_pending_count(), generator.get_completed_count()) == (0, 0)
    assert generator.submit_batch(scene.request(1))


def test_batch_has_the_requests_rows(scene: Any) -> None:
    generator = scene.generator()
    generator.submit_batch(scene.request(5))
    scene.release(5)
    result = generator.get_batch(5)
    rows = result.processed_results
    assert result.batch_id == 5
    assert result.prompts == ["prompt 5", "prompt 5"]
    assert rows.prompt_ids == [[ord(char) for char in "prompt 5"]] * 2
    assert rows.prompt_mask == [[0] * 8] * 2
    assert [len(mask) for mask in rows.completion_mask] == [len(ids) for ids in rows.completion_ids]
    assert [len(logprobs) for logprobs in rows.completion_logprobs] == [len(ids) for ids in rows.completion_ids]
    assert rows.rewards == result.all_reward_dict["reward"] == [0.0, 1.0]
    assert len(result.completions) == 2


def test_batches_are_collected_in_any_order(scene: Any) -> None:
    generator = scene.generator(num_batches_ahead=3)
    for i in range(4):
        generator.submit_batch(scene.request(i))
        scene.release(i)
        until_generated(generator, i + 1)
    assert generator.get_batch(2).batch_id == 2
    assert (generator.get_pending_count(), generator.get_completed_count()) == (1, 2)
    assert [generator.get_batch(i, timeout=0.001).batch_id for i in (1, 0)] == [1, 0]
    assert (generator.get_pending_count(), generator.get_completed_count()) == (1, 0)
    assert generator.get_batch(3).batch_id == 3


def test_get_batch_waits_for_the_generation(scene: Any) -> None:
    generator = scene.generator()
    generator.submit_batch(scene.request(0))
    got: list[int] = []
    waiting = threading.Thread(target=lambda: got.append(generator.get_batch(0).batch_id))
    waiting.start()
    until(lambda: generator.get_pending_count() == 1, "the batch to be pending")
    assert not got
    scene.release(0)
    waiting.join(DEADLINE_S)
    assert got == [0]


@pytest.mark.parametrize("submitted", [True, False])
def test_waiting_ends_with_the_timeout(scene: Any, submitted: bool) -> None:
    generator = scene.generator(generation_timeout=0.3)
    if submitted:
        generator.submit_batch(scene.request(7))
    for timeout, said in ((None, "0.3"), (0, "0.3"), (0.2, "0.2")):
        started = time.monotonic()
        with pytest.raises(TimeoutError, match=f"Batch 7 generation timed out after {said}s"):
            generator.get_batch(7, timeout)
        assert time.monotonic() - started >= float(said)
    # It was late, not lost.
    generator.submit_batch(scene.request(7))
    scene.release(7)
    assert generator.get_batch(7, timeout=DEADLINE_S).batch_id == 7


def test_generation_times_are_averaged(scene: Any) -> None:
    generator = scene.generator()
    assert generator.get_average_generation_time() == 0.0
    results = []
    for i in range(3):
        generator.submit_batch(scene.request(i))
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
        generator.submit_batch(scene.request(i))
    wanted.append(generator.should_submit_more())
    for i in (0, 1):
        scene.release(i)
        until_generated(generator, i + 1)
    wanted.append(generator.should_submit_more())
    generator.get_batch(1)
    wanted.append(generator.should_submit_more())
    generator.get_batch(0)
    assert wanted == [True, True, False, False, True]


def test_without_batches_ahead_none_are_wanted(scene: Any) -> None:
    generator = scene.generator(num_batches_ahead=0)
    assert not generator.should_submit_more()
    assert generator.submit_batch(scene.request(0))
    scene.release(0)
    assert generator.get_batch(0).batch_id == 0


def test_a_collected_batch_can_be_submitted_again(scene: Any) -> None:
    generator = scene.generator()
    for _ in range(2):
        generator.submit_batch(scene.request(0))
        scene.release(0)
        assert generator.get_batch(0).batch_id == 0


@pytest.fixture(params=IMPLEMENTATIONS)
def wrapper(request: pytest.FixtureRequest) -> Any:
    if request.param == "ours":
        return ours.AsyncDataLoaderWrapper
    return original_module("async_dataloader_wrapper").AsyncDataLoaderWrapper


class Loader:
    batch_size = 2
    dataset = "the data"

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.passes = 0

    def __iter__(self) -> Iterator[str]:
        self.passes += 1
        return iter([f"{self.passes}.{i}" for i in range(self.batches)])

    def __len__(self) -> int:
        return self.batches


def test_looking_ahead_does_not_advance(wrapper: Any) -> None:
    wrapped = iter(wrapper(Loader(8)))
    assert wrapped.peek_ahead(0) == []
    assert wrapped.peek_ahead(2) == ["1.0", "1.1"]
    assert next(wrapped) == "1.0"
    assert wrapped.peek_ahead(0) == ["1.0"]
    assert wrapped.peek_ahead() == ["1.1"]
    assert wrapped.peek_ahead(5) == ["1.1", "1.2", "1.3", "1.4", "1.5"]
    assert wrapped.get_future_batches(1, 3) == ["1.2", "1.3", "1.4"]
    assert wrapped.get_future_batches(0, 1) == ["1.1"]
    assert [next(wrapped) for _ in range(7)] == [f"1.{i}" for i in range(1, 8)]


def test_looking_ahead_goes_on_into_the_next_epoch_and_no_further(wrapper: Any) -> None:
    wrapped = iter(wrapper(Loader(2)))
    assert wrapped.peek_ahead(5) == ["1.0", "1.1", "2.0", "2.1"]
    assert wrapped.get_future_batches(3, 2) == ["2.1"]
    assert wrapped.get_future_batches(4, 1) == []


def test_wrapper_shows_the_loader(wrapper: Any) -> None:
    loader = Loader(3)
    wrapped = wrapper(loader, buffer_size=2)
    assert (len(wrapped), wrapped.batch_size, wrapped.dataset) == (3, 2, "the data")
    assert (wrapped.dataloader, wrapped.buffer_size) == (loader, 2)


def test_a_new_pass_in_the_middle_begins_anew(wrapper: Any) -> None:
    wrapped = wrapper(Loader(9))
    assert next(iter(wrapped)) == "1.0"
    assert next(iter(wrapped)) == "2.0"
