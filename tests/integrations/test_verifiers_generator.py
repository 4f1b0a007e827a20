"""The contract of verifiers' AsyncBatchGenerator: ours on a real service and, where it is installed, the original.

`make test-verifiers-generator` installs the last verifiers that has the class. A batch is generated when the scene's
`release` says so.
"""

import asyncio
import importlib.util
import itertools
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from buffer_wire.errors import InvalidField, StaleEpoch
from rollout_buffer.v1 import common_pb2
from tests.support.push import Pusher, group_of_lease
from tests.support.service import ServiceProcess, running_service
from trainer_client import BufferClient, ClientOptions, SamplingParams, Task
from trainer_client.integrations.verifiers import POLICY, AsyncBatchGenerator, BatchResult, get_batch_slice
from trainer_client.publish import FilesPublisher

if TYPE_CHECKING:
    from rollout_buffer.v1 import tasks_pb2

DEADLINE_S = 30.0


def tasks_of(batch_id: int, count: int = 2) -> list[Task]:
    sampling = SamplingParams(max_new_tokens=16)
    return [
        Task(group_size=2, sampling=sampling, prompt_token_ids=[1, 2, 3], metadata={"batch": batch_id, "row": row})
        for row in range(count)
    ]


class ScriptedWorker:
    """Leases all tasks, and pushes the groups of a batch when it is released, the last task first."""

    def __init__(self, address: str, run_id: str) -> None:
        self.released: set[int] = set()
        self._pusher = Pusher(address, run_id)
        self._held: dict[int, list[tuple[tasks_pb2.Lease, common_pb2.WeightVersion]]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(DEADLINE_S)
        self._pusher.close()

    def _run(self) -> None:
        while not self._ended.is_set():
            reply = self._pusher.lease(wait_ms=50)
            for lease in reply.leases:
                batch = int(lease.task.metadata_json.partition(":")[2].partition(",")[0])
                self._held.setdefault(batch, []).append((lease, reply.published))
            for batch in [batch for batch in self._held if batch in self.released]:
                for lease, published in reversed(self._held.pop(batch)):
                    self._pusher.push(group_of_lease(lease, published))


class Ours:
    """Our generator on a service, with a worker that waits to be told."""

    def __init__(self, service: ServiceProcess, run_id: str) -> None:
        self.client = BufferClient(service.address, ClientOptions(timeout_s=DEADLINE_S))
        self.client.create_run(run_id, POLICY)
        self.run_id = run_id
        self.worker = ScriptedWorker(service.address, run_id)

    def generator(self, **options: Any) -> AsyncBatchGenerator:
        return AsyncBatchGenerator(self.client, self.run_id, **options)

    def submit(self, generator: Any, batch_id: int) -> bool:
        submitted: bool = generator.submit_batch(batch_id, tasks_of(batch_id))
        return submitted

    def release(self, batch_id: int) -> None:
        self.worker.released.add(batch_id)

    def until_generated(self, generator: Any, batches: int) -> None:
        def generated() -> bool:
            return self.client.run(self.run_id).ledger.groups.accepted.groups >= 2 * batches

        pause = threading.Event()
        while not generated():
            pause.wait(0.02)

    def close(self) -> None:
        self.worker.stop()
        self.client.close()


class Original:
    """The class of verifiers over an environment in memory."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.released: set[str] = set()

    def generator(self, **options: Any) -> Any:
        config = {"base_url": "http://nowhere", "api_key": "x"}
        config["http_client_args"] = {"limits": {"max_connections": 1}, "timeout": 1.0}  # type: ignore[assignment]
        return self.module.AsyncBatchGenerator(self, config, "model", {"max_tokens": 16}, **options)

    def submit(self, generator: Any, batch_id: int) -> bool:
        request = self.module.BatchRequest(
            batch_id=batch_id,
            env_inputs={"prompt": [f"prompt {batch_id}"] * 2, "answer": [str(batch_id)] * 2},
            processing_class=None,
            mask_env_responses=False,
            max_seq_len=-1,
            mask_truncated_completions=False,
            zero_truncated_completions=False,
            max_concurrent=1,
        )
        submitted: bool = generator.submit_batch(request)
        return submitted

    def release(self, batch_id: int) -> None:
        self.released.add(str(batch_id))

    def until_generated(self, generator: Any, batches: int) -> None:
        while len(generator.generation_times) < batches:
            time.sleep(0.005)

    def close(self) -> None:
        pass

    async def a_generate(self, inputs: dict[str, list[str]], **_: Any) -> SimpleNamespace:
        while inputs["answer"][0] not in self.released:  # noqa: ASYNC110 - another thread releases
            await asyncio.sleep(0.005)
        prompts = inputs["prompt"]
        return SimpleNamespace(prompt=prompts, completion=["x", "x"], state=[], reward=[0.0, 1.0], metrics={})

    def process_env_results_vllm(self, prompts: list[str], **_: Any) -> Any:
        ones = [[1] for _ in prompts]
        return sys.modules["verifiers.types"].ProcessedOutputs(
            prompt_ids=ones,
            prompt_mask=ones,
            completion_ids=ones,
            completion_mask=ones,
            completion_logprobs=[[0.0] for _ in prompts],
            rewards=[0.0, 1.0],
        )


def original_path() -> Path | None:
    """Where the class of verifiers 0.1.2 to 0.1.6 is installed."""
    found = importlib.util.find_spec("verifiers")
    path = Path(found.origin or "").parent / "trainers/async_batch_generator.py" if found is not None else Path()
    return path if path.is_file() else None


def original_module() -> ModuleType:
    """The module, loaded by its path: the package around it wants accelerators."""
    path = original_path()
    assert path is not None
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ABSENT = pytest.mark.skipif(
    original_path() is None, reason="verifiers 0.1.6 is not there: make test-verifiers-generator"
)
RUNS = itertools.count()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with running_service(tmp_path_factory.mktemp("service")) as running:
        yield running


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


# ── of both ──────────────────────────────────────────────────────────────────


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


# ── of ours ──────────────────────────────────────────────────────────────────


def rows_of(result: BatchResult) -> list[tuple[object, object]]:
    return [(group.metadata["batch"], group.metadata["row"]) for group in result.groups]


def test_groups_come_in_the_order_of_the_tasks(ours: Ours) -> None:
    generator = ours.generator()
    generator.start()
    generator.submit_batch(5, tasks_of(5, 6))
    ours.release(5)
    result = generator.get_batch(5)
    assert rows_of(result) == [(5, row) for row in range(6)]
    assert rows_of(pickle.loads(pickle.dumps(result))) == rows_of(result)
    generator.stop()


@pytest.mark.parametrize(("ahead", "pending"), [(0, [0, 0, 0, 0]), (1, [1, 1, 1, 0]), (2, [2, 2, 1, 0])])
def test_batches_run_ahead_of_the_trainer_and_no_further(ours: Ours, ahead: int, pending: list[int]) -> None:
    generator = ours.generator(num_batches_ahead=ahead)
    generator.start()
    ours.release(0)
    ahead_of = []
    for step, result in enumerate(generator.batches(tasks_of(i) for i in range(4))):
        assert (result.batch_id, rows_of(result)) == (step, [(step, 0), (step, 1)])
        ahead_of.append(generator.get_pending_count())
        assert generator.publish() == step + 1
        ours.release(step + 1)
    assert ahead_of == pending
    run = ours.client.run(ours.run_id)
    assert (run.published.version, run.ledger.groups.trained.groups, run.ledger.balanced) == (4, 8, True)
    generator.stop()


def test_weights_are_published_and_what_was_pulled_is_committed(ours: Ours, tmp_path: Path) -> None:
    with FilesPublisher(tmp_path) as publisher:
        generator = ours.generator(publisher=publisher)
        generator.start()
        ours.submit(generator, 0)
        ours.release(0)
        generator.get_batch(0)
        assert generator.publish(lambda folder: (folder / "model").write_text("weights")) == 1
        assert publisher.versions == [1]
        generator.stop()
    assert ours.client.run(ours.run_id).committed_steps == 2


def test_a_failed_task_fails_its_batch_and_no_other(service: ServiceProcess) -> None:
    run_id = f"run-{next(RUNS)}"
    with BufferClient(service.address) as client:
        policy = replace(POLICY, max_attempts=1, lease_ttl_ms=1_000)
        generator = AsyncBatchGenerator(client, run_id, policy=policy)
        generator.start()
        for batch_id in (0, 1):
            generator.submit_batch(batch_id, tasks_of(batch_id, 1))
        with Pusher(service.address, run_id) as pusher:
            leases = {int(lease.task.metadata_json[9]): lease for lease in pusher.lease(max_tasks=1).leases}
            # Batch 0 was leased by a worker that is never heard of again.
            assert list(leases) == [0]
            with pytest.raises(RuntimeError, match=r"Batch 0 generation failed: task .* failed after 1 attempts"):
                generator.get_batch(0, timeout=DEADLINE_S)
            [lease] = pusher.lease(max_tasks=1).leases
            pusher.push(group_of_lease(lease, common_pb2.WeightVersion(epoch=1)))
        assert rows_of(generator.get_batch(1)) == [(1, 0)]
        assert generator.get_pending_count() == 0
        generator.stop()


def test_cancelled_tasks_end_the_wait(ours: Ours) -> None:
    generator = ours.generator()
    generator.start()
    ours.client.drain_run(ours.run_id)
    with pytest.raises(RuntimeError, match="Batch 0 generation failed"):
        generator.get_batch(0, timeout=DEADLINE_S)
    generator.stop()


def test_what_ends_all_generation_is_raised_in_the_caller(ours: Ours) -> None:
    generator = ours.generator()
    generator.start()
    ours.submit(generator, 0)
    successor = ours.generator()
    successor.start()
    with pytest.raises(RuntimeError, match="Batch 0 generation failed") as raised:
        generator.get_batch(0)
    assert isinstance(raised.value.__cause__, StaleEpoch)
    # Groups of the earlier generator's batch are nobody's.
    ours.submit(successor, 1)
    ours.release(0)
    ours.release(1)
    assert rows_of(successor.get_batch(1)) == [(1, 0), (1, 1)]
    generator.stop()
    successor.stop()


def test_every_process_gets_its_groups_or_the_error(ours: Ours) -> None:
    generator = ours.generator(generation_timeout=0.3)
    generator.start()
    generator.submit_batch(0, tasks_of(0, 4))
    box: list[Any] = []

    def sent(entries: list[Any]) -> None:
        box[:] = pickle.loads(pickle.dumps(entries))

    def received(entries: list[Any]) -> None:
        entries[:] = pickle.loads(pickle.dumps(box))

    for rank, (held, broadcast) in enumerate([(generator, sent), (None, received)]):
        with pytest.raises(TimeoutError, match="Batch 0 generation timed out"):
            get_batch_slice(held, 0, rank, 2, broadcast)
    ours.release(0)
    ours.until_generated(generator, 2)
    generator.generation_timeout = DEADLINE_S
    slices = [get_batch_slice(generator, 0, 0, 2, sent)[1], get_batch_slice(None, 0, 1, 2, received)[1]]
    assert [[group.metadata["row"] for group in part] for part in slices] == [[0, 1], [2, 3]]
    with pytest.raises(InvalidField, match="world_size"):
        get_batch_slice(None, 0, 2, 3, received)
    generator.stop()
