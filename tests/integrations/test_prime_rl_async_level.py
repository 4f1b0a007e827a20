"""The async level of PRIME-RL on a real service, with a worker that is slow to load weights."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.service import ServiceProcess, running_service
from tests.workers.building import REWARD
from trainer_client import BufferClient, ClientOptions, SamplingParams, SessionOptions, Task
from trainer_client.integrations.prime_rl import PrimeRLConfig, StepPublisher, open_prime_rl

STEPS = 6
PATIENCE = SessionOptions(pull_timeout_s=60)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with running_service(tmp_path_factory.mktemp("service")) as running:
        yield running


@contextlib.contextmanager
def slow_worker(address: str, run_id: str, folder: Path, load_s: float) -> Iterator[None]:
    """Simulated engines that take `load_s` to load a version."""
    command = [
        sys.executable, "-m", "tests.integrations.prime_rl_worker", str(load_s), "worker", "--address", address,
        "--run", run_id, "--reward", REWARD, "--simulate", "--tokens-per-s", "400", "--slots", "8",
        "--length-median", "12", "--weights-dir", str(folder / "fetched"),
    ]  # fmt: skip
    log = folder / "worker.log"
    path = os.pathsep.join([str(Path.cwd()), str(Path.cwd() / "proto"), os.environ.get("PYTHONPATH", "")])
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env={**os.environ, "PYTHONPATH": path}
        )
    try:
        yield
    except BaseException:
        print(log.read_text())
        raise
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def tasks() -> Iterator[Task]:
    for i in itertools.count():
        yield Task(
            task_id=f"t{i:05d}",
            group_size=2,
            sampling=SamplingParams(max_new_tokens=16),
            prompt_token_ids=[1, 2, 3 + i % 50],
        )


def write(step: int) -> Any:
    def save(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(bytes([step]) * 64)

    return save


@pytest.mark.parametrize("level", [0, 1, 2])
def test_rollouts_of_step_n_come_from_policy_n_less_the_level_or_newer(
    service: ServiceProcess, tmp_path: Path, level: int
) -> None:
    config = PrimeRLConfig(
        batch_size=8, rollouts_per_example=2, seq_len=64, max_async_level=level, pad_to_multiple_of=8, temperature=0.7
    )
    run_id = f"level-{level}"
    oldest: list[int] = []
    with (
        BufferClient(service.address, ClientOptions(timeout_s=30)) as client,
        StepPublisher(tmp_path / "output", keep=8) as publisher,
        slow_worker(service.address, run_id, tmp_path, load_s=0.3),
        open_prime_rl(client, run_id, config, tasks=tasks(), publisher=publisher, options=PATIENCE) as (data, weights),
    ):
        policy = data.session.policy
        assert (policy.max_lookahead, policy.max_staleness, policy.cancel_stale_leases) == (level, level, True)
        for n in range(STEPS):
            if n > 0:
                weights.broadcast_weights(write(n), step=n)
            data.wait_for_batch()
            batch = data.batch
            run = client.run(run_id)
            assert (data.step, batch.step, batch.info.train_version, run.published.version) == (n, n, n, n)
            # Never more than level + 1 batches that no publish covers, whether queued, generated or trained.
            existing = run.ledger.groups
            ahead = existing.queued.groups + existing.forming.groups + run.ledger.tasks.leased
            assert ahead <= level * 4, f"step {n}: {ahead} groups ahead of it"
            versions = np.concatenate([sample.versions[sample.prompt_len :] for sample in batch.samples])
            oldest.append(int(versions.min()))
            assert n - level <= min(group.head_version for group in batch.groups)
            assert max(0, n - level) <= versions.min() <= versions.max() <= n
            assert len(batch.groups) == 4
            tokens = sum(micro["loss_mask"].sum().item() for micro in data.get_batch())
            assert tokens == batch.info.total_loss_tokens
        weights.broadcast_weights(write(STEPS), step=STEPS)
        run = client.run(run_id)
        assert (run.published.version, run.committed_steps) == (STEPS, STEPS)
        assert run.ledger.groups.trained.groups == STEPS * 4
        assert run.ledger.balanced
        assert publisher.steps == list(range(1, STEPS + 1))
    print(f"level {level}: oldest policy of each step {oldest}")
    if level:
        # Generation does run ahead of training.
        assert any(version < n for n, version in enumerate(oldest))


def test_every_rank_has_as_many_micro_batches_and_together_the_whole_step(
    service: ServiceProcess, tmp_path: Path
) -> None:
    config = PrimeRLConfig(batch_size=12, rollouts_per_example=2, seq_len=20, max_async_level=1)
    counts: list[list[int]] = [[], []]
    losses: list[list[int]] = [[], []]
    failures: list[BaseException] = []
    barrier = threading.Barrier(2, timeout=60)
    shared = [0, 0]

    def most_of(rank: int) -> Any:
        def most_of_ranks(count: int) -> int:
            shared[rank] = count
            barrier.wait()
            most = max(shared)
            barrier.wait()
            return most

        return most_of_ranks

    with (
        BufferClient(service.address, ClientOptions(timeout_s=30)) as client,
        slow_worker(service.address, "ranks", tmp_path, load_s=0.0),
        open_prime_rl(
            client, "ranks", config, tasks=tasks(), world_size=2, most_of_ranks=most_of(0), options=PATIENCE
        ) as (data0, weights0),
    ):
        totals: list[int] = []

        def train(rank: int, data: Any, weights: Any) -> None:
            for n in range(3):
                if n > 0:
                    weights.broadcast_weights(None, step=n)
                data.wait_for_batch()
                micro_batches = data.get_batch()
                counts[rank].append(len(micro_batches))
                losses[rank].append(sum(int(micro["loss_mask"].sum()) for micro in micro_batches))
                if rank == 0:
                    totals.append(data.batch.info.total_loss_tokens)

        def other_rank() -> None:
            try:
                with open_prime_rl(
                    client, "ranks", config, rank=1, world_size=2, most_of_ranks=most_of(1), options=PATIENCE
                ) as (data, weights):
                    train(1, data, weights)
            except BaseException as error:  # noqa: BLE001 - seen by the test's own thread
                failures.append(error)
                barrier.abort()

        thread = threading.Thread(target=other_rank)
        thread.start()
        train(0, data0, weights0)
        thread.join(60)
    assert not failures
    assert counts[0] == counts[1]
    assert [a + b for a, b in zip(*losses, strict=True)] == totals


def test_rollouts_of_steps_after_the_checkpoint_come_again(service: ServiceProcess, tmp_path: Path) -> None:
    config = PrimeRLConfig(batch_size=8, rollouts_per_example=2, seq_len=64, max_async_level=1)
    seen: list[list[list[int]]] = []
    with (
        BufferClient(service.address, ClientOptions(timeout_s=30)) as client,
        StepPublisher(tmp_path / "output") as publisher,
        slow_worker(service.address, "again", tmp_path, load_s=0.0),
    ):
        for first in (0, 1):
            with open_prime_rl(
                client, "again", config, tasks=tasks(), publisher=publisher, next_step=first, options=PATIENCE
            ) as (data, weights):
                for n in range(first, 3):
                    if n > 0:
                        weights.broadcast_weights(write(n), step=n)
                    if n == 1 and first == 0:
                        weights.checkpointed(step=n)
                    data.wait_for_batch()
                    seen.append([sample.token_ids.tolist() for sample in data.batch.samples])
        run = client.run("again")
    # Steps 0, 1, 2, and from the checkpoint 1 and 2 once more.
    assert seen[3:] == seen[1:3]
    assert run.checkpointed_steps == 1
    assert publisher.steps == [1, 2]
