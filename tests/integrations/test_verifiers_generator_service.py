"""The generator on a real service with a simulated worker: every request gets its own prompts, failures are its own."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.verifiers_run import Characters
from tests.support.service import ServiceProcess, running_service
from tests.workers.process import worker_process
from trainer_client import BufferClient, ClientOptions, Policy
from trainer_client.integrations.verifiers import (
    AsyncBatchGenerator,
    AsyncDataLoaderWrapper,
    BatchRequest,
    BatchResult,
    get_batch_slice,
)
from trainer_client.publish import FilesPublisher

SIMULATED = ["--simulate", "--tokens-per-s", "2000", "--length-median", "12", "--vocab-size", "256"]
PATIENCE_S = 60.0


def reward(sample: Any) -> float:
    """The number in the metadata; fails where there is none."""
    return float(sample.metadata["answer"])


REWARD = ["--reward", "tests.integrations.test_verifiers_generator_service:reward"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with running_service(tmp_path_factory.mktemp("service")) as running:
        yield running


def request_of(batch_id: int, rows: list[dict[str, str]]) -> BatchRequest:
    inputs = {name: [row[name] for row in rows] for name in ("prompt", "answer", "task")}
    return BatchRequest(batch_id=batch_id, env_inputs=inputs, processing_class=Characters())


def rows_of(number: int) -> list[dict[str, str]]:
    """Three prompts, two generations each."""
    return [{"prompt": f"{number}+{i}=", "answer": str(number + i), "task": "sums"} for i in range(3) for _ in (0, 1)]


def generator_of(service: ServiceProcess, run_id: str, **config: Any) -> AsyncBatchGenerator:
    settings = {
        "base_url": service.address,
        "run_id": run_id,
        "options": ClientOptions(timeout_s=PATIENCE_S),
        **config,
    }
    return AsyncBatchGenerator(None, settings, "m", {"max_tokens": 24}, 2, generation_timeout=PATIENCE_S)


def text(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def test_training_runs_on_batches_that_were_generated_ahead(service: ServiceProcess, tmp_path: Path) -> None:
    batches = 6
    loader = iter(AsyncDataLoaderWrapper([rows_of(10 * i) for i in range(batches)], buffer_size=4))
    submitted = 0
    with (
        worker_process(service.address, "ahead", tmp_path, *SIMULATED, *REWARD),
        FilesPublisher(tmp_path / "weights") as publisher,
        BufferClient(service.address) as client,
    ):
        generator = generator_of(service, "ahead", publisher=publisher)
        generator.start()
        try:
            for step, rows in enumerate(loader):
                # As verifiers' trainer does: this batch and two ahead, numbered by the step that trains on them.
                for ahead in range(submitted, min(step + generator.num_batches_ahead, batches - 1) + 1):
                    future = rows if ahead == step else loader.get_future_batches(ahead - step - 1, 1)[0]
                    assert generator.submit_batch(request_of(ahead, future))
                    submitted = ahead + 1
                result = get_batch_slice(generator, step, rank=0, world_size=1, broadcast=lambda box: box).result
                processed = result.processed_results
                assert result.prompts == [row["prompt"] for row in rows]
                assert [text(ids) for ids in processed.prompt_ids] == [row["prompt"] for row in rows]
                assert processed.rewards == [float(row["answer"]) for row in rows]
                # Two generations of a prompt are two samples.
                assert processed.completion_ids[0] != processed.completion_ids[1]
                assert max(version for versions in result.versions for version in versions) <= step
                assert generator.publish(lambda folder: (folder / "w").write_text("weights")) == step + 1
        finally:
            generator.stop()
        run = client.run("ahead")
    assert (run.published.version, run.ledger.groups.trained.groups) == (batches, 3 * batches)
    assert (run.ledger.tasks.submitted, run.ledger.tasks.completed) == (3 * batches, 3 * batches)
    assert run.ledger.balanced
    assert run.committed_steps == run.next_step


def test_reward_that_fails_fails_its_batch_after_retries_and_no_other(service: ServiceProcess, tmp_path: Path) -> None:
    policy = Policy(batch_groups=1, max_queued_groups=64, overflow_action="block", max_attempts=2, retry_backoff_ms=20)
    with worker_process(service.address, "fails", tmp_path, *SIMULATED, *REWARD, "--max-sample-attempts", "1"):
        generator = generator_of(service, "fails", policy=policy)
        generator.start()
        try:
            broken = [*rows_of(0), {"prompt": "?", "answer": "none", "task": "sums"}]
            generator.submit_batch(request_of(0, broken))
            generator.submit_batch(request_of(1, rows_of(1)))
            with pytest.raises(RuntimeError, match=r"Batch 0 generation failed: task .* failed after 2 attempts.*none"):
                generator.get_batch(0)
            assert generator.get_batch(1).processed_results.rewards == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
        finally:
            generator.stop()


def test_generation_without_a_worker_times_out_and_goes_on_when_one_comes(
    service: ServiceProcess, tmp_path: Path
) -> None:
    generator = generator_of(service, "late")
    generator.start()
    try:
        generator.submit_batch(request_of(0, rows_of(0)))
        with pytest.raises(
            TimeoutError, match=r"Batch 0 generation timed out after 0\.5s: its tasks are at the workers"
        ):
            generator.get_batch(0, timeout=0.5)
        with worker_process(service.address, "late", tmp_path, *SIMULATED, *REWARD):
            assert generator.get_batch(0).batch_id == 0
    finally:
        generator.stop()


def test_second_trainer_takes_the_run_over_and_gets_its_own_batches(service: ServiceProcess, tmp_path: Path) -> None:
    first, second = generator_of(service, "taken"), generator_of(service, "taken")
    first.start()
    try:
        first.submit_batch(request_of(0, rows_of(0)))
        with worker_process(service.address, "taken", tmp_path, *SIMULATED, *REWARD):
            first.get_batch(0)
            first.submit_batch(request_of(1, rows_of(5)))
            second.start()
            second.submit_batch(request_of(1, rows_of(7)))
            assert second.get_batch(1).prompts == [row["prompt"] for row in rows_of(7)]
            # Asking further, the first one hears that it is replaced, or has its batch from before.
            outcome: list[BatchResult | RuntimeError] = []

            def ask() -> None:
                try:
                    first.submit_batch(request_of(2, rows_of(9)))
                    outcome.append(first.get_batch(2))
                except RuntimeError as error:
                    outcome.append(error)

            asking = threading.Thread(target=ask)
            asking.start()
            asking.join(PATIENCE_S)
            assert isinstance(outcome[0], RuntimeError)
            assert "epoch" in str(outcome[0])
    finally:
        first.stop()
        second.stop()
