"""What our AsyncBatchGenerator adds to the contract: failures by batch, batches side by side, exact commits."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from buffer_wire.errors import StaleEpoch
from tests.integrations.verifiers_run import Characters, InMemoryRun
from trainer_client.integrations import verifiers_collector
from trainer_client.integrations.verifiers import AsyncBatchGenerator, BatchRequest
from trainer_client.integrations.verifiers_progress import Progress
from trainer_client.tasks import Task

SAMPLING = {"max_tokens": 16}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> InMemoryRun:
    made = InMemoryRun()
    monkeypatch.setattr("trainer_client.integrations.verifiers_generator.AsyncBufferClient", made.client)
    monkeypatch.setattr(verifiers_collector, "PULL_S", 0.05)
    monkeypatch.setattr(verifiers_collector, "PAUSE_S", 0.01)
    return made


@pytest.fixture
def generator(run: InMemoryRun) -> Any:
    made = AsyncBatchGenerator(None, {"base_url": "nowhere", "run_id": "r"}, "m", SAMPLING, generation_timeout=20)
    made.start()
    yield made
    made.stop()


def request(batch_id: int, *prompts: str, **more: Any) -> BatchRequest:
    inputs = {"prompt": list(prompts), "answer": [f"{batch_id}/{prompt}" for prompt in prompts]}
    return BatchRequest(batch_id=batch_id, env_inputs=inputs, processing_class=Characters(), **more)


def answers(*wanted: str) -> Callable[[Task], bool]:
    return lambda task: task.metadata["answer"] in wanted


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, f"waited 20 s for {what}"
        time.sleep(0.005)


# ── failures ─────────────────────────────────────────────────────────────────


def test_failed_task_fails_its_batch_and_no_other(run: InMemoryRun, generator: AsyncBatchGenerator) -> None:
    generator.submit_batch(request(0, "a", "b"))
    generator.submit_batch(request(1, "c"))
    until(lambda: len(run.tasks) == 3, "the tasks")
    run.fail(run.tasks[1], "KeyError: 'answer'")
    with pytest.raises(RuntimeError, match=r"Batch 0 generation failed: task .* failed after 5 attempts: KeyError"):
        generator.get_batch(0)
    assert generator.get_pending_count() == 1
    run.generate(answers("1/c"))
    assert generator.get_batch(1).prompts == ["c"]


def test_task_that_ends_without_a_group_fails_its_batch(run: InMemoryRun, generator: AsyncBatchGenerator) -> None:
    generator.submit_batch(request(0, "a", "b"))
    until(lambda: len(run.tasks) == 2, "the tasks")
    run.tasks.clear()
    with pytest.raises(RuntimeError, match="Batch 0 generation failed: 2 tasks ended without a group"):
        generator.get_batch(0)


def test_groups_that_come_after_a_while_are_not_taken_for_lost(
    run: InMemoryRun, generator: AsyncBatchGenerator
) -> None:
    run.slow_s = 3 * verifiers_collector.PULL_S  # As a look for failures is due when they come.
    run.generate(lambda _: True)
    generator.submit_batch(request(0, "a"))
    assert generator.get_batch(0).prompts == ["a"]


def test_a_service_that_is_away_for_a_while_ends_nothing(run: InMemoryRun, generator: AsyncBatchGenerator) -> None:
    run.away = 3
    run.generate(lambda _: True)
    generator.submit_batch(request(0, "a"))
    assert generator.get_batch(0).prompts == ["a"]
    assert run.away == 0


def test_a_service_that_is_away_for_longer_than_the_client_tries_ends_nothing(
    run: InMemoryRun, generator: AsyncBatchGenerator
) -> None:
    run.given_up = ["submit_tasks", "run", "commit"]
    generator.submit_batch(request(0, "a"))
    until(lambda: run.given_up == ["commit"], "the tasks, and a look for failures")
    run.generate(lambda _: True)
    assert generator.get_batch(0).prompts == ["a"]
    # The first batch is committed when the second one is asked for.
    generator.submit_batch(request(1, "b"))
    assert generator.get_batch(1).prompts == ["b"]
    until(lambda: run.committed == [0], "the commit")
    assert run.given_up == []


def test_a_request_that_its_tokenizer_refuses_fails_alone(run: InMemoryRun, generator: AsyncBatchGenerator) -> None:
    class Refuses(Characters):
        def encode(self, text: str) -> list[int]:
            raise KeyError(text)

    inputs = {"prompt": ["a"], "answer": ["0/a"]}
    generator.submit_batch(BatchRequest(batch_id=0, env_inputs=inputs, processing_class=Refuses()))
    run.generate(lambda _: True)
    generator.submit_batch(request(1, "b"))
    assert generator.get_batch(1).prompts == ["b"]
    with pytest.raises(RuntimeError, match="Batch 0 generation failed"):
        generator.get_batch(0)


def test_a_batch_that_was_seen_to_be_complete_is_not_generated_again(
    run: InMemoryRun, generator: AsyncBatchGenerator
) -> None:
    run.generate(lambda _: True)
    generator.submit_batch(request(0, "a"))
    until(lambda: len(generator.generation_times) == 1, "the first batch")
    generator.submit_batch(request(1, "b"))
    assert generator.get_batch(1).prompts == ["b"]
    assert generator.get_completed_count() == 1
    assert generator.submit_batch(request(0, "a"))
    assert generator.get_batch(0).prompts == ["a"]
    assert generator.get_pending_count() == 0


def test_what_ends_all_generation_is_raised_for_every_batch(run: InMemoryRun, generator: AsyncBatchGenerator) -> None:
    generator.submit_batch(request(0, "a"))
    generator.submit_batch(request(1, "b"))
    run.generate(answers("0/a"))
    until(lambda: len(generator.generation_times) == 1, "the first batch")
    run.broken = StaleEpoch(1, 2)
    with pytest.raises(RuntimeError, match="Batch 1 generation failed") as failed:
        generator.get_batch(1)
    assert isinstance(failed.value.__cause__, StaleEpoch)
    # What was generated before is still there.
    assert generator.get_batch(0).batch_id == 0
    assert generator.submit_batch(request(2, "c"))
    with pytest.raises(RuntimeError, match="Batch 2 generation failed"):
        generator.get_batch(2)


def test_request_that_cannot_be_a_task_fails_alone(run: InMemoryRun, generator: AsyncBatchGenerator) -> None:
    generator.submit_batch(BatchRequest(batch_id=0, env_inputs={"prompt": ["text"]}))
    generator.submit_batch(request(1, "a"))
    run.generate(answers("1/a"))
    assert generator.get_batch(1).batch_id == 1
    with pytest.raises(RuntimeError, match=r"Batch 0 generation failed: .*processing_class"):
        generator.get_batch(0)


def test_stopped_generator_says_so(run: InMemoryRun, generator: AsyncBatchGenerator) -> None:
    generator.submit_batch(request(0, "a"))
    generator.stop()
    with pytest.raises(RuntimeError, match="was stopped"):
        generator.get_batch(0)
    with pytest.raises(RuntimeError, match="make a new one"):
        generator.start()


# ── batches side by side ─────────────────────────────────────────────────────


def test_later_batch_can_be_ready_first(run: InMemoryRun, generator: AsyncBatchGenerator) -> None:
    for i in range(3):
        generator.submit_batch(request(i, "a", "b"))
    run.generate(answers("2/a", "2/b", "0/a"))
    assert generator.get_batch(2).prompts == ["a", "b"]
    assert generator.is_generating
    run.generate(answers("0/b", "1/a", "1/b"))
    assert [generator.get_batch(i).batch_id for i in (1, 0)] == [1, 0]
    assert not generator.is_generating


def test_groups_that_wait_are_pulled_together(run: InMemoryRun, generator: AsyncBatchGenerator) -> None:
    run.generate(lambda _: True)
    generator.submit_batch(request(0, *"abcdefghij"))
    assert [chr(ids[0]) for ids in generator.get_batch(0).processed_results.prompt_ids] == list("abcdefghij")
    assert run.pulls == [1, 9]


def test_only_steps_of_trained_batches_are_committed(run: InMemoryRun, generator: AsyncBatchGenerator) -> None:
    """Steps hold 0/a, 1/a, 1/b, 0/b: step 1 is trained before step 0, yet nothing before step 0 is committed."""
    generator.submit_batch(request(0, "a", "b"))
    generator.submit_batch(request(1, "a", "b"))
    for i, answer in enumerate(("0/a", "1/a", "1/b")):
        run.generate(answers(answer))
        until(lambda n=i: len(run.pulls) == n + 1, "the pull")  # type: ignore[misc]
    generator.get_batch(1)
    run.generate(answers("0/b"))
    assert generator.get_batch(0).batch_id == 0
    # Asking for a batch says that those before are trained: 1 now, 0 with the next.
    assert run.committed == []
    generator.submit_batch(request(2, "c"))
    with pytest.raises(TimeoutError):
        generator.get_batch(2, timeout=0.2)
    until(lambda: run.committed == [3], "the commit")


def test_failed_batch_does_not_hold_commits_up() -> None:
    progress = Progress()
    progress.begin(5)
    a, b = object(), object()
    progress.pulled(5, [a])
    progress.pulled(6, [b])
    progress.pulled(7, [])
    assert progress.uncommitted() is None
    progress.trained([b])
    assert progress.uncommitted() is None
    progress.trained([a])
    assert progress.uncommitted() == 7
    progress.committed(7)
    assert progress.uncommitted() is None


# ── results ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "mask", "ids", "reward"),
    [
        ({}, [1, 1, 1], [66, 66, 67], 1.0),
        ({"mask_env_responses": True}, [1, 0, 1], [66, 66, 67], 1.0),
        ({"max_seq_len": 5}, [1, 1, 1], [66, 66, 67], 1.0),
        ({"max_seq_len": 4}, [1, 1], [66, 66], 1.0),
        ({"max_seq_len": 4, "mask_truncated_completions": True}, [0, 0], [66, 66], 1.0),
        ({"max_seq_len": 4, "zero_truncated_completions": True}, [1, 1], [66, 66], 0.0),
        ({"max_seq_len": 1}, [], [], 1.0),
    ],
)
def test_completions_are_masked_and_cut_as_asked(
    run: InMemoryRun,
    generator: AsyncBatchGenerator,
    options: dict[str, Any],
    mask: list[int],
    ids: list[int],
    reward: float,
) -> None:
    run.generate(lambda _: True)
    generator.submit_batch(request(0, "pq", "pq", **options))
    result = generator.get_batch(0)
    rows = result.processed_results
    assert (rows.completion_mask[1], rows.completion_ids[1], rows.rewards[1]) == (mask, ids, reward)
    assert rows.prompt_ids[1] == [112, 113][: options.get("max_seq_len", 2)]
    assert rows.completion_logprobs[1] == [-0.5, 0.0, -0.5][: len(ids)]
    assert result.versions[1] == [0] * len(ids)
    assert result.all_reward_dict["reward"] == [0.0, 1.0]
    assert result.completions == ["ABC", "BBC"]
