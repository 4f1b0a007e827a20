import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from buffer_wire.errors import InvalidField
from rollout_buffer.v1 import tasks_pb2
from rollout_workers.engine.types import EngineInfo
from rollout_workers.errors import PromptRefused, RewardFailed
from rollout_workers.generation.prompts import Prompts, check_prompt
from rollout_workers.generation.samples import GroupProgress
from rollout_workers.reward_inputs import from_message, to_message
from rollout_workers.rewards import RewardFunction, RewardInput, Scorer, load_reward
from rollout_workers.versions import BASE
from tests.workers.building import generated, lease, task

INFO_LIMITS: dict[str, Any] = {"vocab_size": 100, "max_input_tokens": 15, "context_length": 20}


class ByteTokenizer:
    """Letters for token ids."""

    def apply_chat_template(self, conversation: Sequence[Mapping[str, Any]], **_: object) -> list[int]:
        if conversation[0]["role"] == "tool":
            raise RuntimeError("Conversation roles must alternate")
        return [7, *[len(message["content"]) for message in conversation]]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(letter) - 97 for letter in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(97 + token % 26) for token in token_ids)


def progress_of(*lengths: int, **more: Any) -> GroupProgress:
    progress = GroupProgress(lease(task(group_size=len(lengths), **more)), np.array([1, 2, 3], np.int32))
    for i, length in enumerate(lengths):
        progress.samples[i].append(generated(i, list(range(length))), lambda _: BASE)
    return progress


def scorer_of(function: RewardFunction, *, timeout_s: float = 10.0, decode: bool = False) -> Scorer:
    prompts = Prompts("model", load=lambda _: ByteTokenizer())
    return Scorer(function, prompts, name="m:f", timeout_s=timeout_s, threads=2, decode=decode)


async def rewards_of(scorer: Scorer, progress: GroupProgress) -> list[float]:
    """Rewards of every sample; raises what the first one failed with."""
    scores = await scorer.score(progress, range(len(progress.samples)))
    for error in scores.failures.values():
        raise error
    return [scores.rewards[i] for i in range(len(progress.samples))]


async def test_plain_function_gets_each_sample_and_runs_in_a_thread() -> None:
    seen: list[RewardInput] = []
    threads: set[str] = set()

    def reward(sample: RewardInput) -> float:
        seen.append(sample)
        threads.add(threading.current_thread().name)
        return float(sample.metadata["base"]) + len(sample.response_ids)

    progress = progress_of(2, 3, metadata_json='{"base": 10}', environment="sums")
    assert await rewards_of(scorer_of(reward), progress) == [12.0, 13.0]
    assert [s.sample_index for s in seen] == [0, 1]
    assert seen[0].prompt_ids.tolist() == [1, 2, 3]
    assert (seen[0].environment, seen[0].finish_reason, seen[0].text) == ("sums", "stop", None)
    assert all(name.startswith("reward") for name in threads)


async def test_coroutine_function_runs_on_the_loop_side_by_side() -> None:
    both = asyncio.Barrier(2)

    async def reward(sample: RewardInput) -> float:
        await both.wait()
        return float(sample.sample_index)

    assert await rewards_of(scorer_of(reward), progress_of(1, 1)) == [0.0, 1.0]


async def test_object_with_an_async_call_is_awaited() -> None:
    class Judge:
        async def __call__(self, sample: RewardInput) -> float:
            return 0.5

    assert await rewards_of(scorer_of(Judge()), progress_of(1)) == [0.5]


async def test_text_is_there_when_the_worker_has_a_tokenizer() -> None:
    texts: list[str | None] = []

    def reward(sample: RewardInput) -> float:
        texts.append(sample.text)
        return 0.0

    await rewards_of(scorer_of(reward, decode=True), progress_of(3, 1))
    assert texts == ["abc", "a"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "much", None])
async def test_result_that_is_no_finite_number_is_refused(value: object) -> None:
    with pytest.raises(RewardFailed, match=r"for sample 0: it gave .*not a finite number"):
        await rewards_of(scorer_of(lambda _: value), progress_of(1))  # type: ignore[arg-type,return-value]


async def test_exception_of_the_function_is_told_with_its_class() -> None:
    def reward(sample: RewardInput) -> float:
        return 1.0 / float(sample.metadata["divisor"])

    with pytest.raises(RewardFailed, match="m:f failed for sample 0: KeyError: 'divisor'"):
        await rewards_of(scorer_of(reward), progress_of(1))


async def test_exception_of_a_coroutine_is_told_with_its_class() -> None:
    async def reward(sample: RewardInput) -> float:
        raise OSError("judge is down")

    with pytest.raises(RewardFailed, match="for sample 0: OSError: judge is down"):
        await rewards_of(scorer_of(reward), progress_of(1))


async def test_function_that_takes_too_long_fails_the_group() -> None:
    release = threading.Event()

    def reward(sample: RewardInput) -> float:
        release.wait(10)
        return 0.0

    began = time.monotonic()
    with pytest.raises(RewardFailed, match=r"no result within 0\.05 s"):
        await rewards_of(scorer_of(reward, timeout_s=0.05), progress_of(1))
    release.set()
    assert time.monotonic() - began < 5


async def test_metadata_that_is_not_json_fails() -> None:
    with pytest.raises(RewardFailed, match="metadata_json is not JSON"):
        await rewards_of(scorer_of(lambda _: 0.0), progress_of(1, metadata_json="{"))


def test_reward_is_loaded_by_name() -> None:
    assert load_reward("tests.workers.building:length_reward").__name__ == "length_reward"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no.such.module:f", "No module named 'no"),
        ("tests.workers.building:nothing", "no attribute 'nothing'"),
        ("tests.workers.building:REWARD", "it is a str"),
    ],
)
def test_reward_that_is_not_there_is_refused(name: str, why: str) -> None:
    with pytest.raises(InvalidField, match=why):
        load_reward(name)


# ── prompts ──────────────────────────────────────────────────────────────────


def chat(*contents: str, role: str = "user") -> tasks_pb2.Task:
    return task(messages=[tasks_pb2.ChatMessage(role=role, content=content) for content in contents])


async def test_messages_go_through_the_chat_template() -> None:
    prompts = Prompts("model", load=lambda _: ByteTokenizer())
    ids = await prompts.token_ids(chat("hello", "ok"))
    assert ids.tolist() == [7, 5, 2]
    assert ids.dtype == np.dtype(np.int32)


async def test_messages_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(PromptRefused, match="task t1: messages need a tokenizer; name one"):
        await Prompts(None).token_ids(chat("hello"))


async def test_tokenizer_that_cannot_be_loaded_is_told(tmp_path: object) -> None:
    with pytest.raises(PromptRefused, match="none can be loaded from"):
        await Prompts(str(tmp_path)).token_ids(chat("hello"))


async def test_template_that_refuses_is_told() -> None:
    with pytest.raises(PromptRefused, match="the chat template refuses it: Conversation roles"):
        await Prompts("model", load=lambda _: ByteTokenizer()).token_ids(chat("x", role="tool"))


async def test_task_without_a_prompt_is_refused() -> None:
    with pytest.raises(PromptRefused, match="neither prompt_token_ids nor messages"):
        await Prompts(None).token_ids(tasks_pb2.Task(task_id="t1"))


@pytest.mark.parametrize(
    ("ids", "more", "field"),
    [
        ([1, 100], {}, "prompt_token_ids is 'token id 100'"),
        ([-1], {}, "prompt_token_ids is 'token id -1'"),
        ([1] * 16, {}, "prompt_token_ids is '16 tokens'"),
        ([1], {"max_new_tokens": 0}, "sampling.max_new_tokens"),
    ],
)
def test_prompt_the_engine_cannot_take_is_refused(ids: list[int], more: dict[str, object], field: str) -> None:
    of = task(prompt_token_ids=ids)
    for name, value in more.items():
        setattr(of.sampling, name, value)
    with pytest.raises(InvalidField, match=field):
        check_prompt(np.array(ids, np.int32), of, info())


def test_response_is_limited_by_the_context() -> None:
    assert check_prompt(np.array([1] * 15, np.int32), task(max_new_tokens=16), info()) == 5
    assert check_prompt(np.array([1], np.int32), task(max_new_tokens=16), info()) == 16


def info() -> EngineInfo:
    return EngineInfo(name="x", version="1", address="x", model_path="", max_running_requests=1, **INFO_LIMITS)


def of_rows() -> GroupProgress:
    """Two samples, the second of two rows."""
    progress = progress_of(2, 3)
    row = progress.row(progress.begin_row(1, 1))
    row.append(generated(1, [4, 5]), lambda _: BASE)
    row.prompt_ids, row.policy = np.array([9], np.int32), "black"
    return progress


async def test_samples_of_several_rows_are_scored_by_functions_that_look_at_them() -> None:
    def by_first(sample: RewardInput) -> float:
        return float(len(sample.response_ids))

    scores = await scorer_of(by_first).score(of_rows(), range(2))
    assert scores.rewards == {0: 2.0}
    with pytest.raises(RewardFailed, match=r"the sample has 2 rows, and the function does not say"):
        raise scores.failures[1]

    def by_all(sample: RewardInput) -> float:
        assert [len(row.prompt_ids) for row in sample.rows] == [1] * len(sample.rows)
        return sum(len(row.response_ids) for row in (sample, *sample.rows))

    by_all.rows = True  # type: ignore[attr-defined]
    assert await rewards_of(scorer_of(by_all), of_rows()) == [2.0, 5.0]


async def test_rows_travel_to_processes() -> None:
    seen: list[RewardInput] = []

    def keep(sample: RewardInput) -> float:
        seen.append(sample)
        return 0.0

    keep.rows = True  # type: ignore[attr-defined]
    await rewards_of(scorer_of(keep, decode=True), of_rows())
    for sample in seen:
        back = from_message(*to_message(sample))
        for before, after in zip((sample, *sample.rows), (back, *back.rows), strict=True):
            assert (after.sample_index, after.text, after.policy) == (before.sample_index, before.text, before.policy)
            assert after.prompt_ids.tolist() == before.prompt_ids.tolist()
            assert after.response_ids.tolist() == before.response_ids.tolist()
    assert [row.policy for sample in seen for row in sample.rows] == ["black"]
