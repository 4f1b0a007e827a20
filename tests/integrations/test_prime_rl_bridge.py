"""The bridge to PRIME-RL's trainer on a real service: whole runs, restarts of either side, and what it refuses."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from buffer_wire.errors import InvalidField, UnknownRun
from tests.integrations.prime_rl_bridge import Carried, N, groups_of_step, tasks, until
from tests.integrations.prime_rl_trainer import FileTrainer, weights_of
from tests.support.push import PushingWorker
from tests.support.rpc import RunRpc, connect
from tests.support.service import CHECKOUT, ServiceProcess, running_service
from trainer_client import BufferClient, ClientOptions, Policy, SamplingParams, Task


def tokens_of(ranks: list[list[dict[str, Any]]]) -> list[list[int]]:
    return [micro["input_ids"] for rank in ranks for micro in rank]


def rollouts_in(ranks: list[list[dict[str, Any]]]) -> set[tuple[int, ...]]:
    """Token ids of the rollouts that have a loss."""
    found = set()
    for micro in itertools.chain(*ranks):
        ends = list(itertools.accumulate(micro["sequence_lengths"], initial=0))
        for start, end in itertools.pairwise(ends):
            if any(micro["loss_mask"][start:end]):
                found.add(tuple(micro["input_ids"][start:end]))
    return found


def test_steps_go_out_and_weights_come_back(service: ServiceProcess, client: BufferClient, tmp_path: Path) -> None:
    with (
        Carried(client, "whole", tmp_path, ranks=2, max_steps=5) as carried,
        PushingWorker(service.address, "whole") as worker,
    ):
        policy_seen = False
        trainer = FileTrainer(tmp_path, ranks=2)
        for step in range(1, 6):
            ranks = trainer.rollouts()
            if not policy_seen:
                policy = client.run("whole").policy
                assert (policy.max_lookahead, policy.max_staleness, policy.cancel_stale_leases) == (1, 8, True)
                policy_seen = True
            assert len(ranks[0]) == len(ranks[1])
            assert rollouts_in(ranks) <= groups_of_step(client, "whole", step - 1)
            trainer.finish(checkpoint=step == 3)
            until(lambda step=step: client.run("whole").published.version == step)  # type: ignore[misc]
            assert client.run("whole").committed_steps == step
        carried.join()
        assert worker.acknowledged
    run = client.run("whole")
    assert (run.next_step, run.checkpointed_steps, run.ledger.balanced) == (5, 3, True)
    assert run.ledger.groups.trained.groups == 5 * N
    newest = next(path for path in (tmp_path / "published").glob("v00000005-*") if path.is_dir())
    assert sorted(path.name for path in newest.iterdir()) == ["model.safetensors"]
    assert (newest / "model.safetensors").read_bytes() == weights_of(5)
    # Those of trained steps went.
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step_5"]


def test_rollouts_are_at_most_one_step_ahead_of_the_published_weights(
    service: ServiceProcess, client: BufferClient, tmp_path: Path
) -> None:
    client.create_run("ahead", Policy(batch_groups=N, max_queued_groups=64))
    with (
        Carried(client, "ahead", tmp_path, batch_groups=None),
        PushingWorker(service.address, "ahead") as worker,
    ):
        trainer = FileTrainer(tmp_path)
        until(lambda: len(worker.acknowledged) >= 4 * N)
        until((tmp_path / "rollouts" / "step_2" / "rank_0.bin").exists)
        assert client.run("ahead").next_step == 2
        trainer.finish()
        until((tmp_path / "rollouts" / "step_3" / "rank_0.bin").exists)
        assert client.run("ahead").next_step == 3


def test_it_ends_when_the_tasks_are_used_up(service: ServiceProcess, client: BufferClient, tmp_path: Path) -> None:
    with (
        Carried(client, "few", tmp_path, tasks=lambda: tasks(2 * N + 1)) as carried,
        PushingWorker(service.address, "few"),
    ):
        trainer = FileTrainer(tmp_path)
        for _ in range(2):
            trainer.rollouts()
            trainer.finish()
        carried.join()
    assert client.run("few").published.version == 2


# ── restarts ─────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def program(service: ServiceProcess, root: Path, run_id: str) -> Iterator[subprocess.Popen[bytes]]:
    """`rollout-buffer bridge prime-rl`; killed at the end of the block."""
    command = [
        sys.executable, "-m", "buffer_cli", "bridge", "prime-rl", "--address", service.address, "--run", run_id,
        "--batch-groups", str(N), "--tasks", "tests.integrations.prime_rl_bridge:tasks", "--output-dir", str(root),
        "--seq-len", "32",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(CHECKOUT)}
    with (root / "bridge.log").open("ab") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
    try:
        yield process
    except BaseException:
        print((root / "bridge.log").read_text())
        raise
    finally:
        process.kill()
        process.wait()


def test_every_step_keeps_its_rollouts_whoever_is_killed(
    service: ServiceProcess, client: BufferClient, tmp_path: Path
) -> None:
    seen: dict[int, list[list[list[int]]]] = {}

    def train(trainer: FileTrainer, **options: bool) -> None:
        seen.setdefault(trainer.step, []).append(tokens_of(trainer.rollouts()))
        trainer.finish(**options)

    def published(step: int) -> None:
        until(lambda: client.run("killed").published.version == step)

    trainer = FileTrainer(tmp_path)
    with PushingWorker(service.address, "killed"):
        with program(service, tmp_path, "killed"):
            train(trainer)
            train(trainer, checkpoint=True)
            train(trainer)
            published(3)
            until((tmp_path / "rollouts" / "step_5" / "rank_0.bin").exists)
        # The bridge is dead; the trainer goes as far as it has rollouts.
        train(trainer)
        train(trainer)
        with program(service, tmp_path, "killed"):
            published(5)
            train(trainer)
            published(6)
            # The trainer dies and goes back to its checkpoint, where the later broadcasts still lie.
            trainer = FileTrainer(tmp_path, step=3)
            published(2)
            train(trainer)
            published(3)
            until((tmp_path / "rollouts" / "step_5" / "rank_0.bin").exists)
        # Both die, and the trainer comes first.
        trainer = FileTrainer(tmp_path, step=3)
        with program(service, tmp_path, "killed") as bridge:
            for step in range(3, 8):
                train(trainer)
                published(step)
            bridge.send_signal(signal.SIGTERM)
            assert bridge.wait(30) == 0
    assert sorted(seen) == list(range(1, 8))
    for step, lives in seen.items():
        assert all(life == lives[0] for life in lives), f"step {step} is trained on other rollouts"
    assert [len(seen[step]) for step in range(1, 8)] == [1, 1, 3, 2, 2, 2, 1]
    run = client.run("killed")
    assert (run.committed_steps, run.checkpointed_steps, run.ledger.balanced) == (7, 2, True)
    assert run.ledger.groups.trained.groups == 7 * N
    trained = [tuple(tokens) for step in seen.values() for tokens in step[0]]
    assert len(set(trained)) == len(trained), "nothing is trained twice"


def test_checkpoints_of_a_life_that_was_left_free_nothing(
    service: ServiceProcess, client: BufferClient, tmp_path: Path
) -> None:
    with Carried(client, "left", tmp_path), PushingWorker(service.address, "left"):
        trainer = FileTrainer(tmp_path)
        for step in range(1, 5):
            trainer.rollouts()
            trainer.finish(checkpoint=step == 2)
        until(lambda: client.run("left").checkpointed_steps == 2)
        # As another life had written it, before the trainer was sent back to its second step.
        left = tmp_path / "checkpoints" / "step_9" / "trainer"
        left.mkdir(parents=True)
        (left / ".metadata").touch()
        trainer = FileTrainer(tmp_path, step=3)
        trainer.rollouts()
        trainer.finish()
        until(lambda: client.run("left").committed_steps == 3)
        trainer.rollouts()
        trainer.finish()
        # By then it has looked at the checkpoints with three steps trained.
        until(lambda: client.run("left").committed_steps == 4)
        assert client.run("left").checkpointed_steps == 2


def test_it_outlives_the_service(tmp_path: Path) -> None:
    with (
        running_service(tmp_path / "service", durability="process") as service,
        # It gives up soon, so that the bridge begins again.
        BufferClient(service.address, ClientOptions(timeout_s=0.5, attempt_timeout_s=0.5)) as hasty,
        BufferClient(service.address, ClientOptions(timeout_s=30)) as client,
        Carried(hasty, "outage", tmp_path) as carried,
        PushingWorker(service.address, "outage"),
    ):
        trainer = FileTrainer(tmp_path)
        before = tokens_of(trainer.rollouts())
        term = client.run("outage").term
        service.kill()
        trainer.finish()
        until(lambda: carried.bridge._waiting is not None and carried.bridge._waiting.what == "service")
        service.start()
        until(lambda: client.run("outage").published.version == 1)
        assert client.run("outage").term > term
        after = tokens_of(trainer.rollouts())
        assert not set(map(tuple, before)) & set(map(tuple, after))
        trainer.finish()
        until(lambda: client.run("outage").committed_steps == 2)
        assert client.run("outage").ledger.balanced


def test_it_says_on_whom_it_waits_and_ends_on_sigterm(service: ServiceProcess, tmp_path: Path) -> None:
    with program(service, tmp_path, "nobody") as bridge:
        log = tmp_path / "bridge.log"
        until(lambda: "rollouts of step 1: waiting for" in log.read_text())
        assert "no worker has asked for a lease" in log.read_text()
        bridge.send_signal(signal.SIGTERM)
        assert bridge.wait(30) == 0


# ── what is refused ──────────────────────────────────────────────────────────


def test_directory_of_another_run_is_refused_and_its_rollouts_are_not_read(
    service: ServiceProcess, client: BufferClient, tmp_path: Path
) -> None:
    FileTrainer(tmp_path, step=8)
    with pytest.raises(InvalidField, match="belongs to another run"), Carried(client, "other", tmp_path) as carried:
        carried.join()
    stale = tmp_path / "fresh" / "rollouts" / "step_1" / "rank_0.bin"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"of another run")
    with Carried(client, "fresh", tmp_path / "fresh"):
        until(lambda: not stale.exists())


def test_run_that_has_trained_waits_for_the_trainer_to_say_where_it_stands(
    service: ServiceProcess, client: BufferClient, tmp_path: Path
) -> None:
    with PushingWorker(service.address, "moved"):
        with Carried(client, "moved", tmp_path / "one"):
            trainer = FileTrainer(tmp_path / "one")
            for _ in range(2):
                trainer.rollouts()
                trainer.finish()
            until(lambda: client.run("moved").published.version == 2)
        term = client.run("moved").term
        with Carried(client, "moved", tmp_path / "two"):
            again = FileTrainer(tmp_path / "two", step=2)
            again.rollouts()
            assert client.run("moved").term == term + 1
            assert client.run("moved").published.version == 1


def test_weights_that_were_skipped_are_published_when_the_trainer_goes_back_to_them(
    service: ServiceProcess, client: BufferClient, tmp_path: Path
) -> None:
    with PushingWorker(service.address, "skipped"):
        trainer = FileTrainer(tmp_path)
        with Carried(client, "skipped", tmp_path):
            until((tmp_path / "rollouts" / "step_2" / "rank_0.bin").exists)
        for _ in range(2):
            trainer.rollouts()
            trainer.finish()
        with Carried(client, "skipped", tmp_path):
            until(lambda: client.run("skipped").published.version == 2)
            term = client.run("skipped").term
            again = FileTrainer(tmp_path, step=2)
            until(lambda: client.run("skipped").term == term + 1)
            until(lambda: client.run("skipped").published.version == 1)
            assert client.run("skipped").committed_steps == 1
            assert RunRpc(connect(service.address), "skipped").get().published_steps == 1
            published = [path for path in (tmp_path / "published").glob("v00000001-*") if path.is_dir()]
            assert [(path / "model.safetensors").read_bytes() for path in published] == [weights_of(1)]
            again.rollouts()
            again.finish()
            until(lambda: client.run("skipped").published.version == 2)
            assert client.run("skipped").ledger.balanced


@pytest.mark.parametrize(
    ("file", "field"), [("adapter_config.json", "model.lora"), ("NCCL_READY", "weight_broadcast.type")]
)
def test_weights_that_engines_cannot_take_are_refused(
    service: ServiceProcess, client: BufferClient, tmp_path: Path, file: str, field: str
) -> None:
    with PushingWorker(service.address, file):
        carried = Carried(client, file, tmp_path)
        carried.thread.start()
        FileTrainer(tmp_path).rollouts()
        folder = tmp_path / "broadcasts" / "step_1"
        folder.mkdir()
        (folder / file).touch()
        (folder / "STABLE").touch()
        with pytest.raises(InvalidField, match=field):
            carried.join()


def test_tasks_sampled_at_another_temperature_are_refused(
    service: ServiceProcess, client: BufferClient, tmp_path: Path
) -> None:
    def warm() -> Iterator[Task]:
        sampling = SamplingParams(max_new_tokens=4, temperature=0.7)
        yield Task(task_id="warm", group_size=2, sampling=sampling, prompt_token_ids=[1])

    with (
        pytest.raises(InvalidField, match=r"tasks\[warm\].sampling.temperature"),
        Carried(client, "warm", tmp_path, tasks=warm) as carried,
    ):
        carried.join()


def test_run_that_is_not_there_is_not_made_without_its_size(
    service: ServiceProcess, client: BufferClient, tmp_path: Path
) -> None:
    with pytest.raises(UnknownRun), Carried(client, "absent", tmp_path, batch_groups=None) as carried:
        carried.join()
