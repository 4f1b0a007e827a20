"""TRL's AsyncGRPOTrainer on the buffer: a real service, the real trl, groups that a real SGLang server generated.

Its attention is computed on the CPU (examples/trl/on_cpu.py). Needs the extra `trl` (make test-trl).
"""

import signal
import socket
import subprocess
import sys
from os import environ
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("trl", reason="the extra trl is not installed (make test-trl)")

import torch
from safetensors.torch import load_file

from buffer_wire.errors import InvalidField, InvalidPolicy
from tests.integrations.trl_async_training import Journal, Watched, config, logged, source_of, trainer_of
from tests.integrations.trl_training import GROUP_SIZE, POLICY, dataset, journalled
from tests.support.recorded_groups import ReplayWorker
from tests.support.service import ServiceProcess
from tests.workers.process import worker_process
from trainer_client import BufferClient, Policy
from trainer_client.publish import FilesPublisher

# Libraries of trl, not of ours, and none of them within its reach.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(400)]


def test_steps_are_trained_and_published_and_none_is_committed_before_it_is_trained(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    committed: list[tuple[int, int]] = []

    class Looking(Watched):
        def update_model_version(self, model_version: int) -> None:
            super().update_model_version(model_version)
            if self.session is not None:
                committed.append((self.session.next_step, client.run(run_id).committed_steps))

    publisher = FilesPublisher(tmp_path / "weights")
    with ReplayWorker(service.address, run_id):
        rollouts = Looking(source_of(client, run_id, publisher), dataset())
        trainer = trainer_of(rollouts, tmp_path, config(tmp_path, max_steps=5))
        before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        trainer.train()

    # TRL asks a step further than it trains.
    assert [batch.step for batch in rollouts.batches] == [0, 1, 2, 3, 4, 5]
    assert committed == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 5)]
    entries = logged(trainer)
    assert [entry["rollout_buffer/step"] for entry in entries] == [0, 1, 2, 3, 4]
    assert all(np.isfinite(entry["loss"]) and entry["grad_norm"] > 0 for entry in entries)
    # The first step is on-policy: what SGLang said of its tokens is what the same weights say here, packed as a tree.
    assert entries[0]["ratio"] == pytest.approx(1, abs=1e-4)
    assert entries[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert entries[-1]["kl"] > 1e-4
    assert max(batch.info.staleness_max for batch in rollouts.batches) <= (POLICY.max_staleness or 0)
    assert not any(entry.get("sample/dropped_stale_total") for entry in entries)
    # TRL takes a micro-batch of a step while the version before is the newest.
    for entry in entries:
        assert entry["sample/staleness_max"] <= entry["rollout_buffer/staleness_max"] + 1

    after = trainer.model.state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    written = load_file(Path(publisher.manifest_of(5).base_url) / "model.safetensors")
    assert written
    for name, value in written.items():
        assert torch.equal(value, after[name])
    state = client.run(run_id)
    assert (state.published.version, state.committed_steps) == (5, 5)
    assert state.ledger.balanced
    assert state.ledger.groups.trained.groups == 10


def test_samples_are_what_the_workers_made(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    handed: list[Any] = []

    class Keeping(Watched):
        def _samples_of(self, batch: Any) -> list[Any]:
            made = super()._samples_of(batch)
            handed.extend(made)
            return made

    with ReplayWorker(service.address, run_id):
        rollouts = Keeping(source_of(client, run_id, None), dataset())
        trainer_of(rollouts, tmp_path, config(tmp_path, max_steps=2)).train()
    groups = [group for batch in rollouts.batches for group in batch.groups]
    samples = [sample for group in groups for sample in group.samples]
    assert len(handed) == len(samples) == 3 * 8
    for made, sample in zip(handed, samples, strict=True):
        assert made.input_ids.tolist() == sample.token_ids.tolist()
        assert made.completion_mask.tolist() == sample.loss_mask.tolist()
        trained = sample.loss_mask.astype(bool)
        assert np.array_equal(made.old_log_probs[trained], sample.logprobs[trained])
        assert not made.old_log_probs[~trained].any()
    for at, group in enumerate(groups):
        rewards = np.array([sample.reward for sample in group.samples])
        expected = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
        of_group = handed[at * GROUP_SIZE : (at + 1) * GROUP_SIZE]
        assert [made.advantage for made in of_group] == pytest.approx(expected, abs=1e-6)
        assert len({made.group_id for made in of_group}) == 1
    assert len({made.group_id for made in handed}) == len(groups)


def test_a_killed_trainer_goes_on_from_its_checkpoint_with_the_same_groups(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    with ReplayWorker(service.address, run_id, patience_s=300):
        program = [sys.executable, "-m", "tests.integrations.trl_async_training"]
        command = [*program, service.address, run_id, str(tmp_path), "4"]
        # Killed as step 3 is logged, before it is saved: what is in no checkpoint has been trained and published.
        assert subprocess.run(command, timeout=200, check=False).returncode == -signal.SIGKILL
        first = journalled(tmp_path / "rank-0.jsonl")
        assert [entry["step"] for entry in first] == [0, 1, 2, 3]
        assert client.run(run_id).published.version == 4

        rollouts = Watched(source_of(client, run_id, FilesPublisher(tmp_path / "weights")), dataset())
        journal = Journal(rollouts, tmp_path / "second.jsonl")
        args = config(tmp_path, max_steps=6, save_strategy="steps", save_steps=2)
        trainer_of(rollouts, tmp_path, args, callbacks=[journal]).train(resume_from_checkpoint=True)

    second = journalled(tmp_path / "second.jsonl")
    assert [entry["step"] for entry in second] == [2, 3, 4, 5]
    assert [entry["global_step"] for entry in second] == [3, 4, 5, 6]
    assert [entry["replayed"] for entry in second][:2] == [True, True]
    for before, again in zip(first[2:], second[:2], strict=True):
        assert (before["tasks"], before["bytes"]) == (again["tasks"], again["bytes"])
        assert before["loss"] == pytest.approx(again["loss"], rel=1e-4, abs=1e-6)
    tasks = [task for entry in first[:2] + second for task in entry["tasks"]]
    assert len(set(tasks)) == len(tasks) == 12
    state = client.run(run_id)
    assert (state.published.version, state.committed_steps) == (6, 6)
    assert state.ledger.balanced


def test_rank_0_pulls_for_all_and_every_rank_trains_on_its_part(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    program = [sys.executable, "-m", "tests.integrations.trl_async_training"]
    command = [*program, service.address, run_id, str(tmp_path), "0"]
    with ReplayWorker(service.address, run_id, patience_s=300):
        ranks = [
            subprocess.Popen(command, env={**environ, **group, "RANK": rank, "LOCAL_RANK": rank}) for rank in ("0", "1")
        ]
        try:
            assert [rank.wait(300) for rank in ranks] == [0, 0]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    steps = journalled(tmp_path / "rank-0.jsonl")
    assert [entry["step"] for entry in steps] == list(range(6))
    assert all(len(entry["tasks"]) == 4 for entry in steps)
    state = client.run(run_id)
    assert (state.published.version, state.committed_steps) == (6, 6)
    assert state.ledger.groups.trained.groups == 24
    assert state.ledger.balanced


def test_engines_load_what_is_published_every_second_step(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    engines = ("--simulate", "--tokens-per-s", "2000", "--vocab-size", "259", "--length-median", "12")
    with worker_process(service.address, run_id, tmp_path / "worker", *engines) as worker:
        source = source_of(client, run_id, FilesPublisher(tmp_path / "weights"))
        rollouts = Watched(source, dataset())
        trainer_of(rollouts, tmp_path, config(tmp_path, max_steps=6, weight_sync_steps=2)).train()
        loaded = [engine.loaded.version for engine in client.run(run_id).engines]
        assert worker.stop() == 0
    assert len(loaded) == 1
    assert loaded[0] > 0
    state = client.run(run_id)
    assert (state.published.version, state.committed_steps) == (3, 6)
    assert max(batch.info.staleness_max for batch in rollouts.batches) <= (POLICY.max_staleness or 0)
    assert state.ledger.balanced


@pytest.mark.parametrize(
    ("args", "policy", "field"),
    [
        ({"token_budget": 4096}, POLICY, "token_budget"),
        ({"per_device_train_batch_size": 3, "gradient_accumulation_steps": 1}, POLICY, "num_generations"),
        ({"max_staleness": 1}, POLICY, "max_staleness of the run"),
        # TRL asks a step ahead, so nothing is ever as fresh as that.
        ({}, Policy(max_staleness=0), "max_staleness: 0 is below 1"),
        ({}, Policy(batch_groups=3), "batch_groups"),
        ({}, Policy(batch_tokens=4096), "batch_tokens"),
        ({}, Policy(max_uses=2, reuse_share_milli=250, reuse_max_staleness=2), "max_uses"),
        ({"weight_sync_steps": 2}, Policy(batches_per_publish=1), "batches_per_publish"),
    ],
)
def test_what_steps_of_a_run_cannot_follow_is_refused(
    args: dict[str, Any], policy: Policy, field: str, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    rollouts = Watched(source_of(client, run_id, None, policy=policy), dataset())
    with pytest.raises((InvalidField, InvalidPolicy), match=field):
        trainer_of(rollouts, tmp_path, config(tmp_path, **args)).train()
    assert rollouts.session is None


def test_a_trainer_that_leaves_samples_out_is_an_error(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    class Older(Watched):
        def _samples_of(self, batch: Any) -> list[Any]:
            made = super()._samples_of(batch)
            made[0].model_version -= 100
            return made

    with ReplayWorker(service.address, run_id):
        rollouts = Older(source_of(client, run_id, None), dataset())
        with pytest.raises(InvalidField, match="samples taken by AsyncGRPOTrainer"):
            trainer_of(rollouts, tmp_path, config(tmp_path)).train()
    assert client.run(run_id).committed_steps == 0
