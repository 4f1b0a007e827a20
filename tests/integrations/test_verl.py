"""verl's FullyAsyncTrainer on the buffer, whole: Ray, its worker groups, its FSDP engine, its checkpoint engines.

One thing is a stand-in: the accelerator, which verl's interface for platforms takes for a CPU (verl_cpu.py).

Needs verl (make test-verl).
"""

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed (make test-verl)", allow_module_level=True)

import ray
import torch
from safetensors.torch import load_file
from verl.experimental.fully_async_policy.detach_utils import assemble_batch_from_rollout_samples
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.utils.model import compute_position_id_with_mask

from buffer_wire.errors import InvalidField
from rollout_buffer.v1.groups_pb2 import ImageRef
from tests.integrations.verl_training import GROUP_SIZE, POLICY, STEP_GROUPS, STEPS, STEPS_PER_VERSION, config
from tests.support.recorded_groups import ReplayWorker, recorded_groups, recorded_tasks, write_recorded_model
from tests.support.service import ServiceProcess
from trainer_client import BufferClient, ClientOptions
from trainer_client.batch import Group
from trainer_client.integrations.verl import BufferRollouter, BufferSource, BufferWeights, train
from trainer_client.integrations.verl.rollouter import PROGRESS
from trainer_client.integrations.verl.rows import Rows
from trainer_client.objectives import grpo_advantages
from trainer_client.publish import FilesPublisher

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(3600)]

CPU = {
    "VERL_USE_EXTERNAL_MODULES": "tests.integrations.verl_cpu",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    # verl's wheel has packages `tests` and `scripts` of its own.
    "PYTHONPATH": str(Path(__file__).parents[2]),
    # Ray gives its own processes little time on a busy machine.
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_agent_register_timeout_ms": "300000",
}


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="verl-") as folder:
        yield Path(folder)


def dumped(folder: Path) -> list[list[tuple[str, str, float]]]:
    """Rows that verl says it trained on, step by step: prompt, response and score."""
    files = sorted(folder.glob("*.jsonl"), key=lambda file: int(file.stem))
    rows = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return [[(row["input"], row["output"], row["score"]) for row in step] for step in rows]


def test_a_killed_trainer_recovers_by_verls_own_checkpoint_and_trains_on_the_same_groups(
    service: ServiceProcess, client: BufferClient, run_id: str, short_path: Path
) -> None:
    folder = short_path / "run"
    write_recorded_model(folder / "model")
    command = [sys.executable, "-m", "tests.integrations.verl_training", service.address, run_id, str(folder)]
    around = {**os.environ, **CPU, "VERL_FILE_LOGGER_PATH": str(folder / "log.jsonl")}
    with ReplayWorker(service.address, run_id, patience_s=1500):
        # Step 4 was trained after the second version, and is in no checkpoint: those are made with the versions.
        assert subprocess.run([*command, "5"], env=around, timeout=1500, check=False).returncode == -signal.SIGKILL
        first, state = dumped(folder / "dump-5"), client.run(run_id)
        assert len(first) == 5
        assert (state.published.version, state.checkpointed_steps) == (2, 4)
        logged = [json.loads(line)["data"] for line in (folder / "log.jsonl").read_text().splitlines()]
        assert subprocess.run([*command, "0"], env=around, timeout=1500, check=False).returncode == 0
    second = dumped(folder / "dump-0")

    # The step that was lost is trained again, from the same groups; those before it are not.
    assert second[0] == first[4]
    assert len(second) == 2
    groups = list(recorded_groups().values())
    for at, step in enumerate(first[:4] + second):
        scores = [score for _, _, score in step]
        rewards = [
            float(reward) for i in range(STEP_GROUPS) for reward in groups[at * STEP_GROUPS + i].rewards[:GROUP_SIZE]
        ]
        assert sorted(scores) == pytest.approx(sorted(rewards))
    assert json.loads((folder / "checkpoints" / "global_step_3" / PROGRESS).read_text()) == {"next_step": STEPS}
    state = client.run(run_id)
    assert (state.published.version, state.committed_steps, state.checkpointed_steps) == (3, STEPS, STEPS)
    assert state.ledger.balanced
    # The first version is on-policy: what SGLang said of its tokens is what verl's actor says of them.
    metrics = {name: value for entry in reversed(logged) for name, value in entry.items()}
    assert metrics["training/rollout_probs_diff_max"] < 1e-5
    assert metrics["actor/grad_norm"] > 0
    assert metrics["rollout_buffer/step"] == 1
    published = [load_file(file) for file in sorted((folder / "weights").glob("*/model.safetensors"))]
    start = load_file(folder / "model" / "model.safetensors")
    assert published
    assert all(any(not weights[name].equal(start[name]) for name in start if name in weights) for weights in published)


# ── the rollouter alone, with verl's own functions on either side ─────────────


def taken(rollouter: BufferRollouter, count: int = STEP_GROUPS) -> list[Any]:
    """Groups as the trainer takes them out of its message queue."""
    return [ray.cloudpickle.loads(rollouter.get_sample()[0]) for _ in range(count)]


def rollouter_of(client: BufferClient, run_id: str, folder: Path, *changes: str, **source: Any) -> BufferRollouter:
    given: dict[str, Any] = {"tasks": recorded_tasks(None, group_size=GROUP_SIZE), "policy": POLICY, **source}
    made = BufferSource(client=client, run_id=run_id, publisher=FilesPublisher(folder / "weights"), **given)
    return BufferRollouter(config(folder, *changes), lambda _: made, pad_token_id=0)


@pytest.fixture
def rollouter(client: BufferClient, run_id: str, tmp_path: Path) -> Iterator[BufferRollouter]:
    made = rollouter_of(client, run_id, tmp_path)
    made.open(0)
    yield made
    made.close()


def synchronize(rollouter: BufferRollouter, version: int, weights: dict[str, torch.Tensor]) -> None:
    """Send weights of an actor of two ranks as CheckpointEngineManager does, by a rollouter of one."""
    ranks = [BufferWeights(bucket_size=1, is_master=True), BufferWeights(bucket_size=1)]
    metadata = [*(rank.prepare() for rank in ranks), rollouter.execute_checkpoint_engine("prepare")]
    named, _ = BufferWeights.build_topology(len(ranks), 1, metadata)
    for rank, directory in zip(ranks, named["directory"], strict=True):
        rank.init_process_group(directory=directory)
        asyncio.run(rank.send_weights(iter(weights.items()), global_steps=version))
    rollouter.update_weights(global_steps=version)
    rollouter.execute_checkpoint_engine("finalize")


def test_groups_go_through_verls_assembly_and_advantages(
    rollouter: BufferRollouter, service: ServiceProcess, run_id: str, tmp_path: Path
) -> None:
    with ReplayWorker(service.address, run_id):
        samples = taken(rollouter)
    batch = assemble_batch_from_rollout_samples(samples, None, config(tmp_path), None)

    groups = [recorded_groups()[uid] for uid in dict.fromkeys(batch.non_tensor_batch["uid"])]
    assert len(groups) == STEP_GROUPS
    rows = [sample for group in groups for sample in group.samples[:GROUP_SIZE]]
    tensors = batch.batch
    assert len(rows) == len(batch)
    for row, sample in enumerate(rows):
        there = tensors["attention_mask"][row].bool()
        mask = tensors["response_mask"][row].bool()
        assert tensors["input_ids"][row][there].tolist() == sample.token_ids.tolist()
        assert tensors["prompts"][row][-sample.prompt_len :].tolist() == sample.token_ids[: sample.prompt_len].tolist()
        assert tensors["responses"][row][mask].tolist() == sample.token_ids[sample.loss_mask == 1].tolist()
        assert tensors["rollout_log_probs"][row][mask].tolist() == sample.logprobs[sample.loss_mask == 1].tolist()
        assert tensors["rm_scores"][row][sample.tokens - sample.prompt_len - 1] == pytest.approx(sample.reward)
    assert tensors["position_ids"].equal(compute_position_id_with_mask(tensors["attention_mask"]))
    assert batch.meta_info["trajectory_param_versions"].tolist() == [0] * len(rows)

    tensors["token_level_rewards"] = tensors["rm_scores"]
    advantages = compute_advantage(batch, "grpo", num_repeat=GROUP_SIZE).batch["advantages"]
    rewards = torch.tensor([sample.reward for sample in rows]).view(STEP_GROUPS, GROUP_SIZE)
    expected = grpo_advantages(rewards).flatten()[:, None] * tensors["response_mask"]
    assert advantages == pytest.approx(expected, abs=1e-4)


def test_a_synchronization_publishes_the_steps_before_it_and_verls_versions_count_on(
    rollouter: BufferRollouter, client: BufferClient, service: ServiceProcess, run_id: str, tmp_path: Path
) -> None:
    weights = {"a": torch.arange(4.0), "b": torch.ones(2, 3, dtype=torch.bfloat16)}
    with ReplayWorker(service.address, run_id):
        taken(rollouter, STEP_GROUPS * STEPS_PER_VERSION)
        synchronize(rollouter, 1, weights)
        state = client.run(run_id)
        assert (state.published.version, state.committed_steps) == (1, STEPS_PER_VERSION)
        [file] = (tmp_path / "weights").glob("*/model.safetensors")
        assert all(load_file(file)[name].equal(tensor) for name, tensor in weights.items())
        samples = taken(rollouter, STEP_GROUPS * (STEPS - STEPS_PER_VERSION))
        versions = [version for sample in samples for version in sample.full_batch.non_tensor_batch["max_global_steps"]]
        assert set(versions) <= {0, 1}
        assert rollouter.get_sample() == (None, 0)


def test_a_recovery_takes_the_run_over_at_the_checkpoint_and_goes_on_in_verls_numbers(
    rollouter: BufferRollouter, service: ServiceProcess, run_id: str, tmp_path: Path
) -> None:
    with ReplayWorker(service.address, run_id):
        taken(rollouter, STEP_GROUPS * STEPS_PER_VERSION)
        synchronize(rollouter, 1, {"a": torch.ones(1)})
        rollouter.save_checkpoint(str(tmp_path / "checkpoints" / "global_step_5"))
        lost = taken(rollouter)
        again = rollouter_of(BufferClient(service.address, ClientOptions(timeout_s=30)), run_id, tmp_path)
        again.open(5)
        samples = taken(again)
        again.close()
    assert [sample.sample_id for sample in samples] == [sample.sample_id for sample in lost]
    # The run is at its version 1, which is verl's 5.
    for before, after in zip(lost, samples, strict=True):
        of_run, of_verl = (each.full_batch.non_tensor_batch["max_global_steps"].tolist() for each in (before, after))
        assert of_verl == [version + 4 for version in of_run]


def test_a_checkpoint_counts_when_verls_tracker_names_it(
    rollouter: BufferRollouter, client: BufferClient, service: ServiceProcess, run_id: str, tmp_path: Path
) -> None:
    checkpoints = tmp_path / "checkpoints"
    with ReplayWorker(service.address, run_id):
        for version, freed in {1: 0, 2: 2 * STEPS_PER_VERSION}.items():
            taken(rollouter, STEP_GROUPS * STEPS_PER_VERSION - (version - 1))
            synchronize(rollouter, version, {"a": torch.ones(1)})
            rollouter.save_checkpoint(str(checkpoints / f"global_step_{version}"))
            if version == 2:
                (checkpoints / "latest_checkpointed_iteration.txt").write_text("2")
            taken(rollouter, 1)
            assert client.run(run_id).checkpointed_steps == freed
    assert json.loads((checkpoints / "global_step_1" / PROGRESS).read_text()) == {"next_step": STEPS_PER_VERSION}


def test_a_checkpoint_without_the_runs_step_is_refused(client: BufferClient, run_id: str, tmp_path: Path) -> None:
    made = rollouter_of(client, run_id, tmp_path)
    with pytest.raises(InvalidField, match=rf"^trainer.resume_mode.*{PROGRESS}"):
        made.open(1)


@pytest.mark.parametrize(
    ("policy", "named"),
    [
        ({"max_uses": 2, "reuse_share_milli": 500, "reuse_max_staleness": 2}, "policy.max_uses"),
        ({"batch_groups": 3}, "policy.batch_groups"),
        ({"batches_per_publish": 1}, "policy.batches_per_publish"),
        ({"stages": ("values",)}, "policy.stages"),
    ],
)
def test_policy_that_verls_loop_contradicts_is_refused(
    policy: dict[str, Any], named: str, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    made = rollouter_of(client, run_id, tmp_path, policy=replace(POLICY, **policy))
    with pytest.raises(InvalidField, match=f"^{named}"):
        made.open(0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ("trainer.val_before_train=True", "trainer.val_before_train"),
        ("trainer.test_freq=5", "trainer.test_freq"),
        ("async_training.use_trainer_do_validate=True", "async_training.use_trainer_do_validate"),
        ("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_rank"),
        ("reward.reward_model.enable=True", "reward.reward_model.enable"),
        ("rollout.total_rollout_steps=3", "rollout.total_rollout_steps"),
    ],
)
def test_a_config_that_the_buffer_does_not_serve_is_refused_before_anything_starts(
    changes: str, named: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidField, match=f"^{named}"):
        train(config(tmp_path, changes), lambda _: pytest.fail("a source was made"))


@pytest.fixture
def group() -> Group:
    return next(group for group in recorded_groups().values() if len(group.samples) == GROUP_SIZE)


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"samples": 3}, "group_size.*rollout.n, 3"), ({"prompt_len": 1}, "data.max_prompt_length"),
     ({"response_len": 1}, "data.max_response_length")],
)  # fmt: skip
def test_groups_that_do_not_fit_verls_rows_are_refused(changes: dict[str, int], named: str, group: Group) -> None:
    rows = replace(Rows(samples=GROUP_SIZE, prompt_len=64, response_len=64, pad_token_id=0), **changes)
    with pytest.raises(InvalidField, match=f"^{named}"):
        rows.of_group(group, 0)


def test_images_and_rows_of_trajectories_are_refused(group: Group) -> None:
    rows = Rows(samples=GROUP_SIZE, prompt_len=64, response_len=64, pad_token_id=0)
    pictured = replace(group)
    pictured.header.images.append(ImageRef(sha256="0" * 64, tokens=1))
    with pytest.raises(InvalidField, match="1 images"):
        rows.of_group(pictured, 0)
    rowed = replace(group)
    for sample in rowed.header.samples:
        sample.trajectory = 1
    with pytest.raises(InvalidField, match="rows of trajectories"):
        rows.of_group(rowed, 0)
