"""Requests to tasks, sampling and policies that are refused, slices of ranks, and looking ahead of a data loader."""

from dataclasses import replace
from typing import Any

import pytest

from buffer_wire.errors import InvalidField
from tests.integrations.verifiers_run import Characters
from trainer_client.integrations import verifiers_collector
from trainer_client.integrations.verifiers import (
    AsyncBatchGenerator,
    AsyncDataLoaderWrapper,
    BatchRequest,
    BatchResult,
    ProcessedOutputs,
    get_batch_slice,
)
from trainer_client.integrations.verifiers_collector import check_policy
from trainer_client.integrations.verifiers_requests import plan_tasks, sampling_of
from trainer_client.tasks import SamplingParams

SAMPLING = {"max_tokens": 16}


# ── requests and results ─────────────────────────────────────────────────────


def test_equal_neighbours_are_one_task_and_keep_their_rows() -> None:
    inputs: dict[str, list[Any]] = {
        "prompt": ["a", "a", "a", "b", "a"],
        "answer": ["1", "1", "2", "2", "1"],
        "info": [{"x": 1}] * 5,
        "task": ["sums"] * 5,
        "index": [7, 7, 7, 8, 7],
    }
    request = BatchRequest(batch_id=0, env_inputs=inputs, processing_class=Characters())
    plans = plan_tasks(request, SamplingParams(max_new_tokens=4), "1.0")
    assert [(plan.start, plan.task.group_size) for plan in plans] == [(0, 2), (2, 1), (3, 1), (4, 1)]
    assert [plan.task.task_id for plan in plans] == ["1.0.0", "1.0.1", "1.0.2", "1.0.3"]
    assert plans[0].task.metadata == {"answer": "1", "info": {"x": 1}, "task": "sums", "index": 7}
    assert (plans[0].task.environment, plans[3].task.prompt_token_ids) == ("sums", [97])


def test_prompts_of_more_samples_than_a_group_may_have_are_several_tasks() -> None:
    request = BatchRequest(batch_id=0, env_inputs={"prompt": ["a"] * 1_500}, processing_class=Characters())
    plans = plan_tasks(request, SamplingParams(max_new_tokens=4), "n")
    assert [(plan.start, plan.task.group_size) for plan in plans] == [(0, 1_024), (1_024, 476)]


def test_chat_is_rendered_with_the_tokenizer_or_by_the_worker() -> None:
    messages = [{"role": "user", "content": "hi"}]
    request = BatchRequest(batch_id=0, env_inputs={"prompt": [messages]}, processing_class=Characters())
    sampling = SamplingParams(max_new_tokens=4)
    [plan] = plan_tasks(request, sampling, "n")
    assert plan.task.prompt_token_ids == [ord(char) for char in "user:hi;"]
    [plan] = plan_tasks(replace(request, processing_class=None), sampling, "n")
    assert (plan.task.messages, plan.task.prompt_token_ids) == (messages, ())


@pytest.mark.parametrize("inputs", [{}, {"prompt": []}, {"prompt": ["a", "b"], "answer": ["1"]}])
def test_columns_that_do_not_fit_are_refused(inputs: dict[str, list[str]]) -> None:
    with pytest.raises(InvalidField):
        plan_tasks(BatchRequest(batch_id=0, env_inputs=inputs), SamplingParams(max_new_tokens=4), "n")


def test_sampling_args_of_the_old_trainer_are_understood() -> None:
    body = {"top_k": 20, "min_p": 0.0, "repetition_penalty": 1.0, "skip_special_tokens": False}
    args = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 99, "n": 1, "presence_penalty": 0.0, "logprobs": True}
    assert sampling_of({**args, "stop": "\n", "extra_body": body}) == SamplingParams(
        max_new_tokens=99, temperature=0.7, top_p=0.9, top_k=20, stop=("\n",)
    )
    assert sampling_of({"max_completion_tokens": 7, "top_k": -1}) == SamplingParams(max_new_tokens=7)


@pytest.mark.parametrize(
    "args", [{}, {"max_tokens": 4, "min_p": 0.1}, {"max_tokens": 4, "n": 2}, {"max_tokens": 4, "seed": 1}]
)
def test_sampling_that_workers_cannot_do_is_refused(args: dict[str, Any]) -> None:
    with pytest.raises(InvalidField, match="sampling_args"):
        sampling_of(args)


@pytest.mark.parametrize(
    "changes",
    [
        {"overflow_action": "drop_oldest"},
        {"max_staleness": 1},
        {"max_staleness": 1, "stale_action": "recycle", "max_generations": 3},
        {"max_lookahead": 1},
        {"micro_batch_groups": 1},
        {"batch_tokens": 100},
        {"filter_equal_rewards": True},
        {"filter_max_mean_reward_milli": 900},
    ],
)
def test_policies_that_lose_groups_are_refused(changes: dict[str, Any]) -> None:
    policy = replace(verifiers_collector.DEFAULT_POLICY, **changes)
    with pytest.raises(InvalidField, match="policy"):
        check_policy(policy)
    check_policy(replace(verifiers_collector.DEFAULT_POLICY, max_staleness=1, stale_action="recycle"))


@pytest.mark.parametrize(
    "config", [{"run_id": "r"}, {"base_url": "x"}, {"base_url": "x", "run_id": "r", "api_key": ""}]
)
def test_config_that_does_not_say_where_is_refused(config: dict[str, str]) -> None:
    with pytest.raises(InvalidField, match="client_config"):
        AsyncBatchGenerator(None, config, "m", SAMPLING)


# ── ranks ────────────────────────────────────────────────────────────────────


class Stub:
    """A generator that gives one answer."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def get_batch(self, batch_id: int, timeout: float | None) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def on_ranks(answer: Any, world_size: int) -> list[Any]:
    """What every rank gets, process 0 first."""
    sent: list[Any] = []

    def broadcast(box: list[Any]) -> None:
        if not sent:
            sent.append(box[0])
        box[0] = sent[0]

    outcomes: list[Any] = []
    for rank in range(world_size):
        stub: Any = Stub(answer) if rank == 0 else None
        try:
            outcomes.append(get_batch_slice(stub, 0, rank=rank, world_size=world_size, broadcast=broadcast))
        except (RuntimeError, TimeoutError, InvalidField) as error:
            outcomes.append(error)
    return outcomes


def result_with(rows: int) -> BatchResult:
    empty: list[Any] = [[] for _ in range(rows)]
    processed = ProcessedOutputs(
        prompt_ids=empty,
        prompt_mask=empty,
        completion_ids=empty,
        completion_mask=empty,
        completion_logprobs=empty,
        rewards=[0.0] * rows,
    )
    return BatchResult(batch_id=0, processed_results=processed)


def test_every_rank_gets_all_and_takes_its_slice() -> None:
    result = result_with(8)
    slices = on_ranks(result, 4)
    assert [(each.start, each.stop, each.result is result) for each in slices] == [
        (0, 2, True), (2, 4, True), (4, 6, True), (6, 8, True),
    ]  # fmt: skip


@pytest.mark.parametrize("error", [RuntimeError("no worker"), TimeoutError("late")])
def test_error_of_process_0_is_raised_on_every_rank(error: Exception) -> None:
    outcomes = on_ranks(error, 3)
    assert [(type(each), str(each)) for each in outcomes] == [(type(error), str(error))] * 3


def test_rows_that_do_not_divide_are_refused_on_every_rank() -> None:
    assert [type(each) for each in on_ranks(result_with(3), 2)] == [InvalidField, InvalidField]


# ── the data loader ──────────────────────────────────────────────────────────


class Loader:
    """Batches "pass.number"."""

    def __init__(self, batches: int) -> None:
        self.batches, self.passes = batches, 0

    def __iter__(self) -> Any:
        self.passes += 1
        return iter([f"{self.passes}.{i}" for i in range(self.batches)])


@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
def test_a_pass_is_an_epoch_and_no_batch_is_lost_or_repeated(ahead: int) -> None:
    wrapped = AsyncDataLoaderWrapper(Loader(3))
    seen = []
    for _ in range(4):
        of_pass = []
        for batch in wrapped:
            of_pass.append(batch)
            wrapped.peek_ahead(ahead)
        seen.append(of_pass)
    assert seen == [[f"{p}.{i}" for i in range(3)] for p in (1, 2, 3, 4)]


def test_looking_further_than_the_buffer_is_refused() -> None:
    wrapped = iter(AsyncDataLoaderWrapper(Loader(9), buffer_size=3))
    with pytest.raises(InvalidField, match="buffer_size"):
        wrapped.peek_ahead(4)
    with pytest.raises(InvalidField, match="buffer_size"):
        wrapped.get_future_batches(2, 2)
    assert wrapped.get_future_batches(1, 2) == ["1.1", "1.2"]


def test_loader_without_batches_ends_at_once() -> None:
    wrapped = AsyncDataLoaderWrapper(Loader(0))
    assert list(wrapped) == []
    assert wrapped.peek_ahead(3) == []
