"""Knobs of Miles and slime as policies and tasks; no service is needed."""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from buffer_wire.errors import InvalidField
from examples.miles import stand_in
from examples.miles.stand_in_samples import MilesSample
from tests.integrations.miles_contract import hf_checkpoint, installed, prompts, types_of
from tests.integrations.prime_rl_trainer import group_of
from tests.support.upstreams import checkout
from trainer_client.integrations import miles
from trainer_client.integrations.miles.contract import MILES, SLIME
from trainer_client.integrations.miles.conversion import Converter, eval_sampling_of, sampling_of
from trainer_client.integrations.miles.prompts import PromptTasks
from trainer_client.integrations.miles.settings import Settings, data_buffer_policy, rollout_policy

Sample = types_of("miles").Sample


@pytest.fixture(autouse=True)
def contract() -> Iterator[None]:
    with installed("miles"), installed("slime"):
        yield


def settings(environ: dict[str, str] | None = None, **values: Any) -> Settings:
    return Settings.of(stand_in.arguments(rollout_buffer_run="r", **values), environ or {})


def policy(environ: dict[str, str] | None = None, **values: Any) -> Any:
    args = stand_in.arguments(rollout_buffer_run="r", **values)
    return rollout_policy(args, Settings.of(args, {}), environ or {})


def test_defaults_are_those_of_the_example() -> None:
    made = policy()
    assert made.preset == "miles"
    assert (made.batch_groups, made.max_staleness) == (8, 4)
    assert (made.max_inflight_groups, made.max_queued_groups) == (8, 40)
    assert (made.batches_per_publish, made.prefetch_batches) == (1, 1)
    assert made.retained_steps == 64


def test_knobs_of_the_example_are_read() -> None:
    made = policy({"MAX_STALENESS_BATCHES": "2", "MAX_INFLIGHT_GROUPS": "20"})
    assert (made.max_staleness, made.max_inflight_groups, made.max_queued_groups) == (2, 20, 24)
    assert policy({"QUEUE_CAP_GROUPS": "17"}).max_queued_groups == 17
    assert policy(async_max_concurrent_samples=21).max_inflight_groups == 5
    assert policy(save_interval=100).retained_steps == 202
    assert policy(update_weights_interval=3).batches_per_publish == 3


def test_max_weight_staleness_recycles() -> None:
    made = policy(max_weight_staleness=2)
    assert (made.preset, made.max_queued_groups) == ("miles_docs(2)", 1000)
    assert policy(max_weight_staleness=2, rollout_batch_size=2048).max_queued_groups == 2048


@pytest.mark.parametrize(
    ("environ", "values", "field"),
    [
        ({"MAX_STALENESS_BATCHES": "many"}, {}, "MAX_STALENESS_BATCHES"),
        ({"MAX_STALENESS_BATCHES": "-1"}, {}, "MAX_STALENESS_BATCHES"),
        ({"QUEUE_CAP_GROUPS": "0"}, {}, "QUEUE_CAP_GROUPS"),
        ({}, {"dynamic_sampling_filter_path": "my.filters.length"}, "dynamic_sampling_filter_path"),
    ],
)
def test_knobs_that_cannot_be_are_named(environ: dict[str, str], values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField, match=field):
        policy(environ, **values)


def test_filter_of_equal_rewards_is_the_services_own() -> None:
    path = "miles.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    assert policy(dynamic_sampling_filter_path=path).filter_equal_rewards is True
    assert policy().filter_equal_rewards is None


def test_attribute_wins_over_the_environment() -> None:
    assert settings({"ROLLOUT_BUFFER_ADDRESS": "there:1"}).address == "there:1"
    assert settings({"ROLLOUT_BUFFER_ADDRESS": "there:1"}, rollout_buffer_address="here:1").address == "here:1"


@pytest.mark.parametrize(
    ("environ", "field"),
    [
        ({"ROLLOUT_BUFFER_PUBLISH": "somebody"}, "ROLLOUT_BUFFER_PUBLISH"),
        ({"ROLLOUT_BUFFER_LOOKAHEAD": "2"}, "ROLLOUT_BUFFER_LOOKAHEAD"),
        ({"ROLLOUT_BUFFER_TIMEOUT_S": "long"}, "ROLLOUT_BUFFER_TIMEOUT_S"),
    ],
)
def test_settings_that_cannot_be_are_named(environ: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidField, match=field):
        settings(environ)
    with pytest.raises(InvalidField, match="ROLLOUT_BUFFER_RUN"):
        Settings.of(stand_in.arguments(), {})


@pytest.mark.parametrize("first", [0, 5, 7])
@pytest.mark.parametrize("interval", [1, 2, 3])
def test_updates_are_counted_as_the_loop_makes_them(first: int, interval: int) -> None:
    """Against the loop of train_async.py: an update follows rollout r when (r + 1) % interval is 0."""
    made = settings(rollout_buffer_first_rollout=first, update_weights_interval=interval)
    for trained in range(12):
        updated = [step for step in range(trained) if (step + first + 1) % interval == 0]
        assert made.updates(0, trained) == len(updated)
        assert max(0, made.updated_steps(trained)) == (updated[-1] + 1 if updated else 0)
    with pytest.raises(InvalidField, match="FIRST_ROLLOUT"):
        made.step_of(first - 1)


def test_data_buffer_has_the_capacity_of_its_factor() -> None:
    made = data_buffer_policy(stand_in.arguments(async_data_buffer_capacity_factor=2.5, max_weight_staleness=3))
    assert (made.batch_groups, made.max_queued_groups, made.max_staleness) == (1, 20, 3)
    assert (made.overflow_action, made.stale_action) == ("block", "drop")
    with pytest.raises(InvalidField, match="capacity_factor"):
        data_buffer_policy(stand_in.arguments(async_data_buffer_capacity_factor=0.1))


# ── tasks ────────────────────────────────────────────────────────────────────


def converter(**values: Any) -> Converter:
    return Converter(MILES, stand_in.arguments(**values), stand_in.Tokenizer())


def group(**values: Any) -> Any:
    return [Sample(group_index=3, index=6 + j, **values) for j in range(2)]


def test_prompts_of_every_kind_become_tasks() -> None:
    made = converter(rollout_stop="END", rollout_top_k=5, rollout_temperature=0.7)
    text = made.task(group(prompt="ab", label="x", metadata={"k": 1}))
    assert (list(text.prompt_token_ids), text.group_size) == ([97, 98], 2)
    assert text.metadata == {
        "label": "x", "metadata": {"k": 1}, "prompt": "ab", "group_index": 3, "indices": [6, 7],
    }  # fmt: skip
    assert (text.sampling.max_new_tokens, text.sampling.top_k, text.sampling.temperature) == (16, 5, 0.7)
    assert list(text.sampling.stop) == ["END"]
    assert list(made.task(group(prompt="ab", tokens=[5, 6])).prompt_token_ids) == [5, 6]
    messages = [{"role": "user", "content": "ab"}]
    chat = made.task(group(prompt=messages))
    assert (chat.messages, list(chat.prompt_token_ids)) == (messages, [])
    assert chat.metadata["prompt"] == messages
    with pytest.raises(InvalidField, match="multimodal_inputs"):
        made.task(group(prompt="ab", multimodal_inputs={"images": [1]}))


def test_response_ends_with_the_context() -> None:
    args = stand_in.arguments(rollout_max_context_len=20)
    assert sampling_of(args, 10).max_new_tokens == 10
    assert sampling_of(args, 2).max_new_tokens == 16
    assert sampling_of(args, 30).max_new_tokens == 1


def test_deterministic_inference_draws_with_the_rollouts_seed() -> None:
    args = stand_in.arguments(sglang_enable_deterministic_inference=True, rollout_seed=7)
    config = types_of("miles").EvalDatasetConfig("d", "d.jsonl", max_response_len=4)
    assert (sampling_of(args, 10).seed, eval_sampling_of(args, config).seed) == (7, 7)
    assert sampling_of(stand_in.arguments(), 10).seed is None


def test_knobs_of_an_evaluations_dataset_reach_the_engine_or_are_refused_by_name() -> None:
    args = stand_in.arguments(eval_min_new_tokens=2)

    def sampling(**values: Any) -> Any:
        return eval_sampling_of(args, types_of("slime").EvalDatasetConfig("d", "d.jsonl", max_response_len=4, **values))

    assert sampling().min_new_tokens == 2
    made = sampling(min_new_tokens=3, repetition_penalty=1.2, stop=["END"], top_p=0.5)
    assert (made.min_new_tokens, made.repetition_penalty, made.top_p) == (3, 1.2, 0.5)
    assert list(made.stop) == ["END"]
    for name, value in (("app_service", "http://there"), ("no_stop_trim", False), ("skip_special_tokens", True)):
        with pytest.raises(InvalidField, match=rf"eval_datasets\.d\.{name}"):
            sampling(**{name: value})


# ── which tokens could be drawn ──────────────────────────────────────────────


def masked() -> Any:
    """A delivered group of one sample: two prompt tokens, two drawn ones with a tool's between them."""
    sample = SimpleNamespace(
        token_ids=np.array([1, 2, 5, 8, 6], np.int32), logprobs=np.zeros(5, np.float32),
        loss_mask=np.array([0, 0, 1, 0, 1], np.uint8), prompt_len=2, reward=0.0, finish_reason="stop", spans=(),
        extras={
            "sampling_mask": np.array([5, 9, 6, 7, 4], np.int32),
            "sampling_mask_counts": np.array([0, 0, 2, 0, 3], np.int32),
        },
    )  # fmt: skip
    facts = {"group_index": 0, "indices": [0], "prompt": "", "label": None, "metadata": {}}
    return SimpleNamespace(
        samples=(sample,),
        metadata=facts,
        prior_uses=0,
        refuse_rows=lambda _who: None,
        refuse_images=lambda _why: None,
    )


def test_slime_is_told_which_tokens_could_be_drawn_where_it_cuts_by_top_p() -> None:
    made = Converter(SLIME, stand_in.arguments(rollout_top_p=0.9), stand_in.Tokenizer())
    assert made.task(group(prompt="ab")).columns == ("sampling_mask",)
    sample: Any = made.samples(masked())[0]
    assert sample.rollout_top_p_token_ids.tolist() == [5, 9, 6, 7, 4]
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 2, 2, 5]
    for values in ({}, {"rollout_top_k": 5}):
        assert (
            Converter(SLIME, stand_in.arguments(**values), stand_in.Tokenizer()).task(group(prompt="a")).columns == ()
        )
    assert converter(rollout_top_p=0.9).task(group(prompt="ab")).columns == ()


def test_routing_replay_asks_for_routed_experts_of_every_input() -> None:
    made = converter(use_rollout_routing_replay=True)
    assert made.task(group(prompt="ab")).columns == ("routed_experts",)
    both = Converter(
        SLIME, stand_in.arguments(use_rollout_routing_replay=True, rollout_top_p=0.9), stand_in.Tokenizer()
    )
    assert both.task(group(prompt="ab")).columns == ("sampling_mask", "routed_experts")
    generated = masked()
    experts = np.arange(5 * 2 * 3, dtype=np.uint8).reshape(5, 2, 3)
    generated.samples[0].extras["routed_experts"] = experts
    sample: Any = made.samples(generated)[0]
    assert sample.rollout_routed_experts.dtype == np.int32
    assert np.array_equal(sample.rollout_routed_experts, experts[:-1])


def test_a_teachers_logprobs_of_a_reward_function_are_the_samples() -> None:
    generated = masked()
    generated.samples[0].extras["teacher_logprobs"] = np.array([0, 0, -1, -2, -3], np.float32)
    sample: Any = converter().samples(generated)[0]
    assert sample.teacher_log_probs == [-1.0, -2.0, -3.0]


def test_rows_of_trajectories_are_refused() -> None:
    with pytest.raises(InvalidField, match="rows of trajectories"):
        converter().samples(group_of(1, 1, 0, lengths=(3, 4, 5), rows=[(1, True), (1, True), (2, True)]))


def test_groups_that_are_used_again_are_refused() -> None:
    with pytest.raises(InvalidField, match=r"policy\.max_uses.*trained on before"):
        converter().samples(dataclasses.replace(group_of(1, 0, lengths=(3, 4)), prior_uses=1))


@dataclasses.dataclass
class LaterSample(MilesSample):
    """Later sample of Miles with its change 301be963."""

    rollout_sampling_mask_ids: list[int] | None = None
    rollout_sampling_mask_offsets: list[int] | None = None


def test_later_miles_wants_a_row_for_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MILES.module("utils.types"), "Sample", LaterSample)
    made = converter(rollout_top_k=5)
    assert made.task(group(prompt="ab")).columns == ("sampling_mask",)
    sample: Any = made.samples(masked())[0]
    assert sample.rollout_sampling_mask_ids == [5, 9, 8, 6, 7, 4]
    assert sample.rollout_sampling_mask_offsets == [0, 2, 3, 6]


# ── the data source's position ───────────────────────────────────────────────


def source_of(args: Any) -> Any:
    return types_of("miles").RolloutDataSourceWithBuffer(args)


class Plain:
    """A data source of somebody's own, that says nothing of its position."""

    def __init__(self, first: int = 0) -> None:
        self.next = first

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        self.next += num_samples
        return [[Sample(group_index=self.next - 1, index=self.next - 1, prompt=f"{self.next - 1}")]]


def drawn(tasks: PromptTasks, count: int) -> list[int]:
    iterator = iter(tasks)
    return [next(iterator).metadata["group_index"] for _ in range(count)]  # type: ignore[misc]


def prompt_tasks(source: Any, **values: Any) -> PromptTasks:
    return PromptTasks(stand_in.arguments(**values), source, converter().task)


@pytest.mark.parametrize("restored_at", [0, 2, 4, 11])
def test_their_own_data_source_goes_on_where_the_run_stands(tmp_path: Path, restored_at: int) -> None:
    checkpoint = hf_checkpoint(tmp_path) if checkout("miles") else "none"
    args = stand_in.arguments(prompt_data=str(prompts(tmp_path, 3)), hf_checkpoint=checkpoint, rollout_shuffle=True)
    source = source_of(args)
    tasks = prompt_tasks(source, rollout_shuffle=True)
    first = [task.metadata for task, _ in zip(tasks, range(4), strict=False)]
    assert [facts["group_index"] for facts in first] == [0, 1, 2, 3]
    # zip has drawn one more than it gave; the position is the one behind that.
    state = tasks.state()
    rest = [task.metadata for task, _ in zip(tasks, range(5), strict=False)]

    other = source_of(args)
    other.get_samples(restored_at)
    again = prompt_tasks(other, rollout_shuffle=True)
    again.load_state(state)
    assert [task.metadata for task, _ in zip(again, range(5), strict=False)] == rest


def test_any_other_data_source_is_drawn_from_until_it_is_there() -> None:
    tasks = prompt_tasks(Plain())
    assert drawn(tasks, 4) == [0, 1, 2, 3]
    behind = prompt_tasks(Plain(first=1))
    behind.load_state(tasks.state())
    assert drawn(behind, 2) == [4, 5]
    ahead = prompt_tasks(Plain(first=6))
    ahead.load_state(tasks.state())
    with pytest.raises(InvalidField, match="4, where the run stands"):
        drawn(ahead, 1)


def test_outside_of_the_framework_it_is_said_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "miles.utils.processing_utils", None)
    args = stand_in.arguments(rollout_buffer_run="r", rollout_buffer_address="127.0.0.1:1")
    with pytest.raises(ImportError, match="runs inside miles's own processes"):
        miles.generate_rollout_fully_async(args, 0, Plain())
