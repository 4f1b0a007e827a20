"""A data set of TRL as tasks of the buffer, and groups as rollouts of TRL; neither torch nor trl is needed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import pytest

from buffer_wire.errors import InvalidField
from tests.support.recorded_groups import recorded_groups
from trainer_client.batch import Group
from trainer_client.integrations.trl_tasks import (
    RowTasks,
    TaskOptions,
    rollouts_of,
    row_of,
    sampling_of,
    worker_reward,
)
from trainer_client.tasks import SamplingParams, Task

ROWS: list[dict[str, Any]] = [{"prompt": f"p{i}", "answer": i, "env": "sums" if i % 2 else "code"} for i in range(10)]
OPTIONS = TaskOptions(group_size=4, sampling=SamplingParams(max_new_tokens=8), shuffle=True, seed=3)


def encode(prompt: Any) -> list[int]:
    return list(str(prompt).encode())


def tasks(count: int, options: TaskOptions = OPTIONS) -> list[Task]:
    return list(islice(RowTasks(ROWS, encode, options), count))


def row_numbers(of: list[Task]) -> list[int]:
    return [int(str(task.metadata["trl_row"])) for task in of]


def test_every_pass_has_every_row_once_in_an_order_of_its_own() -> None:
    numbers = row_numbers(tasks(30))
    passes = [numbers[i : i + 10] for i in (0, 10, 20)]
    assert all(sorted(each) == list(range(10)) for each in passes)
    assert passes[0] != passes[1] != passes[2]
    assert row_numbers(tasks(20, replace(OPTIONS, shuffle=False))) == [*range(10), *range(10)]


def test_the_stream_is_the_same_again_so_that_a_cursor_is_a_place_in_it() -> None:
    assert tasks(25) == tasks(25)
    assert row_numbers(tasks(10)) != row_numbers(tasks(10, replace(OPTIONS, seed=4)))


def test_a_task_carries_the_prompt_and_the_columns_that_its_reward_needs() -> None:
    (task,) = tasks(1, replace(OPTIONS, shuffle=False, environment_column="env"))
    assert (task.prompt_token_ids, task.messages) == ([ord("p"), ord("0")], ())
    assert task.metadata == {"answer": 0, "env": "code", "trl_row": 0}
    assert (task.group_size, task.environment) == (4, "code")
    (task,) = tasks(1, replace(OPTIONS, shuffle=False, metadata_columns=["answer"]))
    assert task.metadata == {"answer": 0, "trl_row": 0}
    assert task.environment == ""


def test_messages_go_to_the_worker_as_they_are_and_text_does_not() -> None:
    options = replace(OPTIONS, prompts="messages")
    messages = [{"role": "user", "content": "1+1="}]
    (task,) = islice(RowTasks([{"prompt": messages}], encode, options), 1)
    assert (task.prompt_token_ids, task.messages) == ((), messages)
    with pytest.raises(InvalidField, match=r"^prompts"):
        tasks(1, options)


def test_a_data_set_without_rows_is_refused() -> None:
    with pytest.raises(InvalidField, match=r"^train_dataset"):
        RowTasks([], encode, OPTIONS)


@dataclass(kw_only=True)
class Config:
    max_completion_length: int = 256
    temperature: float = 0.7
    top_p: float = 0.9
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    generation_kwargs: Mapping[str, Any] | None = None


def test_workers_sample_as_the_config_says() -> None:
    assert sampling_of(Config()) == SamplingParams(max_new_tokens=256, temperature=0.7, top_p=0.9, top_k=None)
    asked = sampling_of(Config(top_k=20, generation_kwargs={"stop": "\n\n", "stop_token_ids": [2]}))
    assert (asked.top_k, asked.stop, asked.stop_token_ids) == (20, ("\n\n",), (2,))
    asked = sampling_of(Config(min_p=0.1, repetition_penalty=1.1, generation_kwargs={"seed": 0, "min_new_tokens": 5}))
    assert (asked.min_p, asked.repetition_penalty, asked.seed, asked.min_new_tokens) == (0.1, 1.1, 0, 5)
    assert sampling_of(Config(top_k=-1, generation_kwargs={"min_tokens": 3})).min_new_tokens == 3


def test_sampling_that_workers_are_not_asked_for_is_refused() -> None:
    with pytest.raises(InvalidField, match=r"^generation_kwargs.*presence_penalty"):
        sampling_of(Config(generation_kwargs={"seed": 1, "presence_penalty": 0.5}))


def group_with(metadata: str) -> Group:
    group = next(iter(recorded_groups().values()))
    header = type(group.header)()
    header.CopyFrom(group.header)
    header.metadata_json = metadata
    return replace(group, header_bytes=header.SerializeToString())


def test_the_row_of_a_group_is_found_again() -> None:
    row = row_of(group_with('{"trl_row": 7}'), ROWS)
    assert row == ROWS[7]
    assert row is not ROWS[7]


@pytest.mark.parametrize("metadata", ["", '{"trl_row": 10}', '{"trl_row": -1}', '{"trl_row": "7"}'])
def test_a_group_of_a_task_that_is_not_of_this_data_set_is_refused(metadata: str) -> None:
    with pytest.raises(InvalidField, match=r"^metadata\.trl_row"):
        row_of(group_with(metadata), ROWS)


def test_a_rollout_holds_the_response_as_the_worker_made_it() -> None:
    sample = next(iter(recorded_groups().values())).samples[0]
    mask = sample.loss_mask.copy()
    mask[sample.prompt_len + 1] = 0
    made = rollouts_of([replace(sample, loss_mask=mask)])
    (prompt,), (completion,), (logprobs,) = made["prompt_ids"], made["completion_ids"], made["logprobs"]
    assert [*prompt, *completion] == sample.token_ids.tolist()
    assert len(prompt) == sample.prompt_len
    assert np.array_equal(np.float32(logprobs), sample.logprobs[sample.prompt_len :])
    assert made["env_mask"][0][:3] == [1, 0, 1]
    assert len(made["env_mask"][0]) == len(completion)
    assert worker_reward(prompts=[], completions=[], buffer_reward=made["buffer_reward"]) == [sample.reward]
