"""Tests of what the adapter returns, taken by Miles' and slime's own code on the way to their trainers, on a CPU."""

import argparse
import asyncio
import importlib
import inspect
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.miles.stand_in import arguments
from tests.integrations.miles_contract import job, length_reward, types_of
from tests.integrations.test_miles_data_buffer import Buffer, finished
from tests.support.service import ServiceProcess
from tests.support.upstreams import needs
from tests.workers.process import worker_process
from trainer_client.integrations import miles, slime

ENGINE = (
    "--simulate", "--tokens-per-s", "4000", "--vocab-size", "900", "--length-median", "6", "--lease-wait-s", "1",
    "--reward", f"{length_reward.__module__}:length_reward",
)  # fmt: skip
TRAINING: dict[str, Any] = {
    "advantage_estimator": "grpo", "rewards_normalization": True, "grpo_std_normalization": True,
    "disable_rollout_trim_samples": False, "use_dynamic_global_batch_size": False, "global_batch_size": 6,
    "balance_data": False, "multi_lora_n_adapters": 0, "load_debug_rollout_data": None,
}  # fmt: skip


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    yield
    miles.stop_global_worker()


def train_data(samples: Any, args: Namespace) -> tuple[Any, Any]:
    """Train data as Miles' RolloutManager makes it: samples in a row, what the trainer gets of them, a shard a rank."""
    post = importlib.import_module("miles.ray.rollout.rollout_data_conversion").postprocess_rollout_data
    conversion = importlib.import_module("miles.ray.rollout.train_data_conversion")
    flat, metadata = post(args, samples, {"dp_size": 2})
    made = conversion.convert_samples_to_train_data(args, flat, metadata, None, None)
    shards = conversion.split_train_data_by_dp_raw(args, made, dp_size=2)
    assert sorted(i for shard in shards for i in shard["partition"]) == list(range(len(flat)))
    return flat, made


@needs("miles")
def test_miles_trains_on_a_rollout(service: ServiceProcess, tmp_path: Path) -> None:
    it = job(tmp_path, service.address, "miles", **TRAINING)
    call = importlib.import_module("miles.rollout.base_types").call_rollout_fn
    with worker_process(service.address, "miles", tmp_path, *ENGINE):
        output = call(miles.generate_rollout_fully_async, it.args, 0, it.source(), evaluation=False)
    for group in output.samples:
        for sample in group:
            sample.validate()
    flat, made = train_data(output.samples, it.args)
    assert len(flat) == 6
    assert made["sample_indices"] == sorted(made["sample_indices"])
    assert [len(values) for values in made["rollout_log_probs"]] == made["response_lengths"]
    assert made["raw_reward"] == [sample.reward for sample in flat]
    assert sum(made["rewards"]) == pytest.approx(0, abs=1e-4)


@needs("slime")
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_slime_trains_on_a_rollout(service: ServiceProcess, tmp_path: Path, top_p: float) -> None:
    """Tokens with --rollout-top-p below 1: its trainer draws from the tokens that the engine could draw."""
    run_id = f"slime-{top_p}"
    it = job(tmp_path, service.address, run_id, "slime", rollout_top_p=top_p, **TRAINING)
    rollout = importlib.import_module("slime.ray.rollout")
    manager = object.__new__(rollout.RolloutManager.__ray_metadata__.modified_class)
    vars(manager).update(
        args=it.args, generate_rollout=slime.generate_rollout_fully_async, data_source=it.source(),
        custom_convert_samples_to_train_data_func=None, custom_reward_post_process_func=None,
    )  # fmt: skip
    with worker_process(service.address, run_id, tmp_path, *ENGINE):
        flat, metrics = manager._get_rollout_data(rollout_id=0)
    made = manager._convert_samples_to_train_data(flat)
    importlib.import_module("slime.observability.rollout_data_utils").tensorize_rollout_data_for_training(made)
    assert metrics["rollout/fully_async/train_version"] == 0
    assert len(made["tokens"]) == 6
    if top_p == 1.0:
        assert "rollout_top_p_token_ids" not in made
        return
    for sample, ids, offsets in zip(
        flat, made["rollout_top_p_token_ids"], made["rollout_top_p_token_offsets"], strict=True
    ):
        response = sample.tokens[-sample.response_length :]
        for token, start, end in zip(response, offsets, offsets[1:], strict=False):
            assert token in ids[start:end]


@pytest.fixture
def args(service: ServiceProcess, request: pytest.FixtureRequest) -> Any:
    return arguments(
        rollout_batch_size=3, n_samples_per_prompt=2, rollout_buffer_address=service.address,
        rollout_buffer_run=request.node.name[:60], rollout_buffer_timeout_s=30, **TRAINING,
    )  # fmt: skip


@needs("miles")
async def test_miles_own_consumer_drains_the_buffer_as_its_default(args: Any) -> None:
    """A rollout of groups, one of them without a token, from our buffer and from Miles'."""
    module = importlib.import_module("miles.rollout.fully_async_rollout")
    default = importlib.import_module("miles.rollout.fully_async_data_buffer").DefaultDataBuffer
    types = types_of("miles")
    drained = []
    for make in (Buffer, lambda of: default(types.DataBufferConstructorInput(of, print))):
        buffer: Any = make(args)
        groups = [finished(i, "1") for i in (2, 0, 1)]
        for sample in groups[1].group:
            sample.tokens, sample.response, sample.response_length, sample.weight_versions = [], "", 0, []
            sample.loss_mask = sample.rollout_log_probs = None
            sample.status = types.Sample.Status.TRUNCATED
        for group in groups:
            await buffer.put(group)
        function = object.__new__(module.FullyAsyncRolloutFn)
        worker = asyncio.create_task(asyncio.Event().wait())
        vars(function).update(args=args, _output=buffer, _worker=worker, _sample_filter=None)
        given = importlib.import_module("miles.rollout.base_types").RolloutFnTrainInput(rollout_id=0, weight_version=1)
        output = await function._drain(given)
        worker.cancel()
        _, made = train_data(output.samples, args)
        drained.append((made, {name: output.metrics.get(name) for name in ("rollout/fully_async/queue_size",)}))
        if make is Buffer:
            await buffer.aclose()
    assert drained[0] == drained[1]


@needs("miles")
def test_buffer_has_every_method_of_the_contract_with_its_parameters() -> None:
    theirs = importlib.import_module("miles.rollout.fully_async_data_buffer").DataBuffer
    assert theirs.__abstractmethods__
    for name in theirs.__abstractmethods__:
        ours = getattr(miles.BufferServiceDataBuffer, name)
        known = inspect.signature(ours).parameters
        assert inspect.iscoroutinefunction(ours) == inspect.iscoroutinefunction(getattr(theirs, name))
        for parameter, given in inspect.signature(getattr(theirs, name)).parameters.items():
            taken = any(each.kind is given.kind for each in known.values())
            assert parameter in known or (given.kind is inspect.Parameter.VAR_KEYWORD and taken)


@needs("slime")
def test_slime_calls_the_hook_of_its_updates_with_these_arguments() -> None:
    provider = importlib.import_module("slime.utils.arguments").get_slime_extra_args_provider()
    actions = {action.dest: action for action in provider(argparse.ArgumentParser())._actions}
    assert "hook(args, version_dir: str, rollout_engines)" in actions["custom_update_weight_post_write_path"].help
    assert list(inspect.signature(slime.post_write_hook).parameters) == ["args", "version_dir", "rollout_engines"]
    assert {"update_weight_mode", "update_weight_transport", "update_weight_disk_keep_files"} <= actions.keys()
    assert "full" in actions["update_weight_mode"].choices
