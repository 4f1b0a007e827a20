"""The plain torch loop on groups that a real engine generated: its figures, and a trainer that dies and comes back."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from examples.plain import __main__ as program
from examples.plain import loop
from tests.support.recorded_groups import ReplayWorker, recorded_groups, recorded_tasks, write_recorded_model
from tests.support.service import ServiceProcess, running_service
from trainer_client import BufferClient, Policy
from trainer_client.collate import PaddedBatch

N = 8
POLICY = Policy(batch_groups=N, max_queued_groups=N, overflow_action="block")
"""Nothing is dropped, so the tasks come in order."""


class TrainerDied(Exception):
    """Point where a test ends a trainer."""


def recorded_model(folder: Path) -> PreTrainedModel:
    """Version 0, as the recording engine had it."""
    write_recorded_model(folder / "model")
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    return model


def options(service: ServiceProcess, folder: Path, steps: int) -> loop.LoopOptions:
    return loop.LoopOptions(
        address=service.address, run_id="r", steps=steps, checkpoint=folder / "checkpoint.pt",
        weights=folder / "weights", checkpoint_every=2, policy=POLICY, timeout_s=60,
    )  # fmt: skip


def check_ledgers(service: ServiceProcess, steps: int) -> None:
    with BufferClient(service.address) as client:
        run = client.run("r")
    assert run.ledger.balanced
    assert run.ledger.groups.trained.groups == steps * N
    assert (run.committed_steps, run.checkpointed_steps) == (steps, steps)
    assert run.published.version == steps


def test_version_0_is_trained_at_ratio_1_and_later_ones_move_away_from_it(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []
    with running_service(tmp_path) as service, ReplayWorker(service.address, "r"):
        model = recorded_model(tmp_path)
        loop.train(model, recorded_tasks(None), options(service, tmp_path, 4), lambda _, metrics: seen.append(metrics))
        check_ledgers(service, 4)
    assert [metrics["rollout_buffer/step"] for metrics in seen] == [0, 1, 2, 3]
    assert all(math.isfinite(value) for metrics in seen for value in metrics.values())
    # The engine's logprobs are the model's own, as long as it has not moved.
    first = seen[0]
    assert first["rollout_buffer/staleness_max"] == 0
    assert first["ratio_min"] == pytest.approx(1, abs=1e-4)
    assert first["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert first["kl_behaviour"] == pytest.approx(0, abs=1e-8)
    rewards = [sample.reward for group in list(recorded_groups().values())[:N] for sample in group.samples]
    assert first["reward"] == pytest.approx(float(np.mean(rewards)), abs=1e-6)
    for metrics in seen[1:]:
        assert metrics["ratio_max"] - metrics["ratio_min"] > 0.01
        assert metrics["kl_behaviour"] > 0
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert state["next_step"] == 4
    untrained = recorded_model(tmp_path).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(state["model"][name], tensor)
        assert not torch.equal(untrained[name], tensor)


def test_a_trainer_that_dies_goes_on_from_its_checkpoint_with_the_same_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[tuple[int, torch.Tensor, torch.Tensor, float]] = []
    train_step = loop.train_step

    def recorded(model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: PaddedBatch) -> dict[str, float]:
        figures = train_step(model, optimizer, batch)
        trained.append((batch.step, batch.token_ids, batch.logprobs, figures["loss"]))
        return figures

    monkeypatch.setattr(loop, "train_step", recorded)
    replayed: dict[int, float] = {}

    def on_step(step: int, metrics: dict[str, float]) -> None:
        replayed[step] = metrics["rollout_buffer/replayed"]

    with running_service(tmp_path) as service, ReplayWorker(service.address, "r"):
        dying = recorded_model(tmp_path)
        save = dying.save_pretrained
        saved: list[Path] = []

        def save_twice(directory: Path, **more: Any) -> None:
            if len(saved) == 2:
                raise TrainerDied
            saved.append(directory)
            save(directory, **more)

        monkeypatch.setattr(dying, "save_pretrained", save_twice)
        # Trained on step 2, but neither published nor saved it.
        with pytest.raises(TrainerDied):
            loop.train(dying, recorded_tasks(None), options(service, tmp_path, 4))
        loop.train(recorded_model(tmp_path), recorded_tasks(None), options(service, tmp_path, 4), on_step)
        check_ledgers(service, 4)
        # All steps are in the checkpoint: nothing is left to do.
        loop.train(recorded_model(tmp_path), recorded_tasks(None), options(service, tmp_path, 4))
    assert [step for step, *_ in trained] == [0, 1, 2, 2, 3]
    assert replayed == {2: 1.0, 3: 0.0}
    (_, first_ids, first_logprobs, first_loss), (_, again_ids, again_logprobs, again_loss) = trained[2:4]
    assert torch.equal(first_ids, again_ids)
    assert torch.equal(first_logprobs, again_logprobs)
    assert again_loss == pytest.approx(first_loss, rel=1e-5)


@pytest.mark.timeout(300)
def test_the_program_starts_all_it_needs_and_goes_on_when_it_is_started_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(["--steps", "1", "--out", str(tmp_path)]) == 0
    assert program.main(["--steps", "2", "--out", str(tmp_path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    steps = [line for line in lines if line and line[0].isdigit() and len(line) == 9]
    assert [line[0] for line in steps] == ["0", "1"]
    assert all(math.isfinite(float(value)) for line in steps for value in line)


def test_an_address_without_the_engines_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(["--address", "127.0.0.1:1"])
    assert "--model" in capsys.readouterr().err
