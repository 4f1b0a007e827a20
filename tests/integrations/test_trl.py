"""TRL's GRPOTrainer on the buffer: a real service, the real trl, groups that a real SGLang server generated.

Needs the extra `trl` (make test-trl).
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("trl", reason="the extra trl is not installed (make test-trl)")

import torch
from datasets import Dataset
from safetensors.torch import load_file
from trl import GRPOTrainer

from rollout_buffer.v1 import tasks_pb2
from rollout_buffer.v1.common_pb2 import WeightVersion
from tests.integrations.trl_training import (
    GROUP_SIZE,
    POLICY,
    Journal,
    Watched,
    config,
    dataset,
    journalled,
    trainer_of,
)
from tests.support.push import GroupArrays, PushingWorker
from tests.support.recorded_groups import ReplayWorker, recorded_groups, replayed
from tests.support.service import ServiceProcess
from tests.workers.process import worker_process
from trainer_client import BufferClient
from trainer_client.integrations.trl import BufferSource, worker_reward
from trainer_client.publish import FilesPublisher

# Libraries of trl, not of ours, and none of them within its reach.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(400)]

Make = Callable[[tasks_pb2.Lease, WeightVersion], GroupArrays]


@pytest.fixture
def publisher(tmp_path: Path) -> FilesPublisher:
    return FilesPublisher(tmp_path / "weights")


def by_prompt() -> dict[str, Any]:
    """The recorded groups by the prompt's text."""
    return {str(group.metadata["prompt"]): group for group in recorded_groups().values()}


def rows_of(trainer: Watched) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Every sample that was pulled, with its rows of what TRL made of it, without padding."""
    for batch, output in trainer.made:
        for i, sample in enumerate(batch.samples):
            response = sample.tokens - sample.prompt_len
            named = {name: value[i] for name, value in output.items() if value.ndim}
            yield (
                sample,
                {
                    "prompt_ids": named["prompt_ids"][-sample.prompt_len :],
                    **{
                        name: named[name][:response] if named[name].ndim else named[name]
                        for name in named
                        if not name.startswith("prompt")
                    },
                },
            )


def test_steps_are_trained_corrected_and_published(
    service: ServiceProcess, client: BufferClient, run_id: str, publisher: FilesPublisher, tmp_path: Path
) -> None:
    with ReplayWorker(service.address, run_id):
        trainer = trainer_of(client, run_id, tmp_path, config(tmp_path, max_steps=5), publisher=publisher)
        before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        trainer.train()

    assert [batch.step for batch, _ in trainer.made] == [0, 1, 2, 3, 4]
    assert all(np.isfinite(entry["loss"]) and entry["grad_norm"] > 0 for entry in trainer.logged)
    # The first step is on-policy: what SGLang said of its tokens is what the same weights say here.
    assert trainer.logged[0]["sampling/sampling_logp_difference/max"] < 1e-4
    assert trainer.logged[0]["sampling/importance_sampling_ratio/min"] == pytest.approx(1, abs=1e-4)
    assert trainer.logged[-1]["sampling/sampling_logp_difference/max"] > 1e-2
    assert [entry["rollout_buffer/published_version"] for entry in trainer.logged] == [1, 2, 3, 4, 5]
    assert max(entry["rollout_buffer/staleness_max"] for entry in trainer.logged) <= (POLICY.max_staleness or 0)
    assert max(group.tail_version for batch, _ in trainer.made for group in batch.groups) > 0

    after = trainer.model.state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    newest = Path(publisher.manifest_of(5).base_url)
    for name, value in load_file(newest / "model.safetensors").items():
        assert torch.equal(value, after[name])
    state = client.run(run_id)
    assert (state.published.version, state.committed_steps) == (5, 5)
    assert state.ledger.balanced
    assert state.ledger.groups.trained.groups == 10


def test_trl_sees_tokens_logprobs_masks_and_rewards_as_the_worker_made_them(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    with PushingWorker(service.address, run_id, make=with_tool_tokens):
        trainer = trainer_of(client, run_id, tmp_path, config(tmp_path, max_steps=2), publisher=None)
        trainer.train()

    rows = list(rows_of(trainer))
    assert len(rows) == 2 * 8
    for sample, row in rows:
        response = slice(sample.prompt_len, None)
        assert row["prompt_ids"].tolist() == sample.token_ids[: sample.prompt_len].tolist()
        assert row["completion_ids"].tolist() == sample.token_ids[response].tolist()
        assert row["tool_mask"].tolist() == sample.loss_mask[response].tolist()
        assert 0 in row["tool_mask"].tolist()
        assert np.array_equal(row["sampling_per_token_logps"].numpy(), sample.logprobs[response])
        ratio = torch.exp(row["old_per_token_logps"] - row["sampling_per_token_logps"]).clamp(max=3)
        trained = row["tool_mask"].bool()
        assert torch.allclose(row["importance_sampling_ratio"][trained], ratio[trained], rtol=1e-5)
    for batch, output in trainer.made:
        rewards = torch.tensor(np.stack([group.rewards for group in batch.groups]))
        expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        assert torch.allclose(output["advantages"], expected.flatten(), atol=1e-5)


def with_tool_tokens(lease: tasks_pb2.Lease, loaded: WeightVersion) -> GroupArrays:
    """The recorded group, in which the third to fifth token of a response come from a tool."""
    made = replayed(lease, loaded)
    samples = []
    for sample in made.samples:
        mask, logprobs = sample.loss_mask.copy(), sample.logprobs.copy()
        tool = slice(sample.prompt_len + 2, sample.prompt_len + 5)
        mask[tool], logprobs[tool] = 0, 0
        samples.append(replace(sample, loss_mask=mask, logprobs=logprobs))
    return replace(made, samples=samples)


def test_reward_functions_of_the_trainer_get_the_rows_of_the_groups(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    calls: list[dict[str, Any]] = []

    def distinct_tokens(**given: Any) -> list[float]:
        calls.append(given)
        return [float(len(set(ids))) for ids in given["completion_ids"]]

    with ReplayWorker(service.address, run_id):
        trainer = trainer_of(
            client,
            run_id,
            tmp_path,
            config(tmp_path, max_steps=2, reward_weights=[1.0, 0.1]),
            publisher=None,
            reward_funcs=[worker_reward, distinct_tokens],
        )
        trainer.train()

    recorded = by_prompt()
    assert len(calls) == 2
    for given, (batch, _) in zip(calls, trainer.made, strict=True):
        assert given["buffer_reward"] == [sample.reward for sample in batch.samples]
        for i, sample in enumerate(batch.samples):
            prompt = given["prompts"][i]
            assert given["answer"][i] == f"of {prompt}"
            of_prompt = recorded[prompt].samples[i % GROUP_SIZE]
            assert given["completion_ids"][i] == sample.token_ids[sample.prompt_len :].tolist()
            assert np.array_equal(of_prompt.token_ids, sample.token_ids)
    assert {"rewards/worker_reward/mean", "rewards/distinct_tokens/mean"} <= trainer.logged[0].keys()


@pytest.mark.parametrize(
    ("shape", "batches"),
    [
        ({"max_steps": 4, "steps_per_generation": 2, "per_device_train_batch_size": 4}, 2),
        ({"max_steps": 4, "num_iterations": 2}, 2),
        ({"max_steps": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 1}, 4),
    ],
    ids=["two optimizer steps a batch", "two passes over a batch", "two batches an optimizer step"],
)
def test_weights_are_published_where_a_step_of_the_run_ends(
    shape: dict[str, Any],
    batches: int,
    service: ServiceProcess,
    client: BufferClient,
    run_id: str,
    publisher: FilesPublisher,
    tmp_path: Path,
) -> None:
    with ReplayWorker(service.address, run_id):
        trainer = trainer_of(client, run_id, tmp_path, config(tmp_path, **shape), publisher=publisher)
        trainer.train()
    assert [batch.step for batch, _ in trainer.made] == list(range(batches))
    assert client.run(run_id).published.version == 2
    assert client.run(run_id).committed_steps == batches
    assert max(entry["rollout_buffer/staleness_max"] for entry in trainer.logged) <= 2


def test_a_killed_trainer_goes_on_from_its_checkpoint_with_the_same_groups(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    with ReplayWorker(service.address, run_id, patience_s=300):
        command = [sys.executable, "-m", "tests.integrations.trl_training", service.address, run_id, str(tmp_path), "4"]
        # Killed as step 3 is logged, before it is saved: what is in no checkpoint has been trained and published.
        assert subprocess.run(command, timeout=200, check=False).returncode == -signal.SIGKILL
        first = journalled(tmp_path / "rank-0.jsonl")
        assert [entry["step"] for entry in first] == [0, 1, 2, 3]
        assert client.run(run_id).published.version == 4

        journal = Journal(tmp_path / "second.jsonl")
        trainer = trainer_of(
            client,
            run_id,
            tmp_path,
            config(tmp_path, max_steps=6, save_strategy="steps", save_steps=2),
            publisher=FilesPublisher(tmp_path / "weights"),
            callbacks=[journal],
        )
        journal.trainer = trainer
        trainer.train(resume_from_checkpoint=True)

    second = journalled(tmp_path / "second.jsonl")
    assert [entry["step"] for entry in second] == [2, 3, 4, 5]
    assert [entry["global_step"] for entry in second] == [3, 4, 5, 6]
    assert [entry["replayed"] for entry in second] == [True, True, False, False]
    for before, again in zip(first[2:], second[:2], strict=True):
        assert (before["tasks"], before["tokens"]) == (again["tasks"], again["tokens"])
        assert before["loss"] == pytest.approx(again["loss"], rel=1e-4, abs=1e-7)
        assert before["grad_norm"] == pytest.approx(again["grad_norm"], rel=1e-4)
    tasks = [task for entry in first[:2] + second for task in entry["tasks"]]
    assert len(set(tasks)) == len(tasks) == 12
    state = client.run(run_id)
    assert (state.published.version, state.committed_steps) == (6, 6)
    assert state.ledger.balanced


def test_ranks_share_every_step_in_whole_groups(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    command = [sys.executable, "-m", "tests.integrations.trl_training", service.address, run_id, str(tmp_path), "0"]
    with ReplayWorker(service.address, run_id, patience_s=300):
        ranks = [
            subprocess.Popen(command, env={**os.environ, **group, "RANK": rank, "LOCAL_RANK": rank})
            for rank in ("0", "1")
        ]
        try:
            assert [rank.wait(300) for rank in ranks] == [0, 0]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    shards = [journalled(tmp_path / f"rank-{rank}.jsonl") for rank in (0, 1)]
    assert [[entry["step"] for entry in shard] for shard in shards] == [list(range(6))] * 2
    assert all(len(entry["tasks"]) == 2 for shard in shards for entry in shard)
    tasks = [task for shard in shards for entry in shard for task in entry["tasks"]]
    assert len(set(tasks)) == len(tasks) == 24
    state = client.run(run_id)
    assert (state.published.version, state.committed_steps) == (6, 6)
    assert state.policy.batch_groups == 4
    assert state.ledger.balanced
    assert state.ledger.groups.trained.groups == 24


def test_engines_of_a_worker_load_what_the_trainer_publishes(
    service: ServiceProcess, client: BufferClient, run_id: str, publisher: FilesPublisher, tmp_path: Path
) -> None:
    engines = ("--simulate", "--tokens-per-s", "2000", "--vocab-size", "259", "--length-median", "12")
    with worker_process(service.address, run_id, tmp_path / "worker", *engines) as worker:
        trainer = trainer_of(client, run_id, tmp_path, config(tmp_path, max_steps=5), publisher=publisher)
        trainer.train()
        loaded = [engine.loaded.version for engine in client.run(run_id).engines]
        assert worker.stop() == 0
    assert len(loaded) == 1
    assert loaded[0] > 0
    # The reward of this worker is the response's length.
    for batch, _ in trainer.made:
        for sample in batch.samples:
            assert sample.reward == sample.tokens - sample.prompt_len
    assert max(entry["rollout_buffer/staleness_max"] for entry in trainer.logged) <= 2
    assert client.run(run_id).ledger.balanced


def test_chat_prompts_are_rendered_by_the_trainer_or_left_to_the_worker(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    leased: list[tasks_pb2.Task] = []

    def make(lease: tasks_pb2.Lease, loaded: WeightVersion) -> GroupArrays:
        leased.append(lease.task)
        plain = dataset()[0]["prompt"]
        known = tasks_pb2.Lease()
        known.CopyFrom(lease)
        known.task.prompt_token_ids[:] = [3 + byte for byte in plain.encode()]
        return replayed(known, loaded)

    chat = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"{i}+1="}] for i in range(8)]})
    for prompts, of_run in (("token_ids", f"{run_id}-ids"), ("messages", f"{run_id}-chat")):
        leased.clear()
        with PushingWorker(service.address, of_run, make=make):
            source = BufferSource(client=client, run_id=of_run, publisher=None, policy=POLICY, prompts=prompts)  # type: ignore[arg-type]
            trainer = Watched(
                str(tmp_path / "model"), args=config(tmp_path, max_steps=1), train_dataset=chat, buffer=source
            )
            trainer.train()
        (task, *_) = leased
        content = chat[int(recorded_row(task))]["prompt"][0]["content"]
        if prompts == "messages":
            assert [(message.role, message.content) for message in task.messages] == [("user", content)]
            assert not task.prompt_token_ids
        else:
            text = trainer.processing_class.decode(list(task.prompt_token_ids))
            assert text == f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
            assert not task.messages


def recorded_row(task: tasks_pb2.Task) -> int:
    return int(json.loads(task.metadata_json)["trl_row"])


def test_a_trl_that_ignores_masks_is_an_error(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    class Forgetful(Watched):
        def _rollout(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, list[Any]]:
            made = super()._rollout(prompts, trainer)
            made["env_mask"] = [[1] * len(mask) for mask in made["env_mask"]]
            return made

    with PushingWorker(service.address, run_id, make=with_tool_tokens):
        source = BufferSource(client=client, run_id=run_id, publisher=None, policy=POLICY)
        trainer = Forgetful(str(tmp_path / "model"), args=config(tmp_path), train_dataset=dataset(), buffer=source)
        with pytest.raises(ImportError, match="trains on"):
            trainer.train()
    assert trainer.session is None
