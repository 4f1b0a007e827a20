"""Tests of what BufferGRPOTrainer refuses, before a service is asked for anything.

Needs the extra `trl` (make test-trl).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="the extra trl is not installed (make test-trl)")

from transformers import TrainerState
from trl import GRPOConfig, GRPOTrainer

from buffer_wire.errors import InvalidField
from tests.integrations.trl_training import config, dataset, trainer_of
from tests.support.recorded_groups import write_recorded_model
from trainer_client import BufferClient, Policy
from trainer_client.integrations.trl import BufferGRPOTrainer, BufferSource, missing_hooks

# Libraries of trl, not of ours, and none of them within its reach.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def client() -> Iterator[BufferClient]:
    """Client of a service that is not there."""
    with BufferClient("127.0.0.1:1") as unconnected:
        yield unconnected


@pytest.mark.parametrize(
    ("changes", "others", "named"),
    [
        ({"eval_strategy": "steps", "eval_steps": 1}, {}, "eval_strategy"),
        ({"restore_callback_states_from_checkpoint": True}, {}, "restore_callback_states_from_checkpoint"),
        (
            {"gradient_accumulation_steps": 3, "steps_per_generation": 2},
            {},
            r"steps_per_generation \* num_iterations",
        ),
        ({}, {"rollout_func": print}, "rollout_func"),
        ({}, {"tools": [print]}, "tools"),
        ({}, {"train_dataset": iter(())}, "train_dataset"),
    ],
)
def test_what_the_buffer_does_not_serve_is_refused_by_name(
    changes: dict[str, Any], others: dict[str, Any], named: str, client: BufferClient, tmp_path: Path
) -> None:
    source = BufferSource(client=client, run_id="r", publisher=None)
    given = {"train_dataset": dataset(), **others}
    with pytest.raises(InvalidField, match=f"^{named}"):
        BufferGRPOTrainer(str(tmp_path / "model"), args=config(tmp_path, **changes), buffer=source, **given)


@pytest.mark.parametrize(
    ("policy", "named"),
    [
        (Policy(batch_groups=3), r"policy\.batch_groups"),
        (Policy(batch_tokens=4096), r"policy\.batch_tokens"),
        (Policy(batches_per_publish=3), r"policy\.batches_per_publish"),
    ],
)
def test_a_policy_that_does_not_fit_the_config_is_refused(
    policy: Policy, named: str, client: BufferClient, tmp_path: Path
) -> None:
    write_recorded_model(tmp_path / "model")
    # Two batches an optimizer step, two groups a batch.
    args = config(tmp_path, gradient_accumulation_steps=2, steps_per_generation=1)
    with pytest.raises(InvalidField, match=f"^{named}"):
        trainer_of(client, "r", tmp_path, args, publisher=None, policy=policy).train()


def test_evaluation_is_not_the_trainers(client: BufferClient, tmp_path: Path) -> None:
    write_recorded_model(tmp_path / "model")
    trainer = trainer_of(client, "r", tmp_path, config(tmp_path), publisher=None)
    with pytest.raises(InvalidField, match=r"^evaluate"):
        trainer.evaluate(dataset())


def test_a_checkpoint_of_another_trainer_does_not_say_where_to_go_on(client: BufferClient, tmp_path: Path) -> None:
    write_recorded_model(tmp_path / "model")
    trainer = trainer_of(client, "r", tmp_path, config(tmp_path), publisher=None)
    with pytest.raises(InvalidField, match=r"checkpoint-3.*BufferGRPOTrainer"):
        trainer._run.on_train_begin(trainer.args, TrainerState(global_step=3), trainer.control)


def test_a_trl_without_the_hooks_is_named() -> None:
    class Old:
        def __init__(self, model: str) -> None: ...

    assert missing_hooks(GRPOTrainer, GRPOConfig) == []
    assert "GRPOTrainer(rollout_func=)" in missing_hooks(Old, GRPOConfig)
    assert "GRPOConfig.steps_per_generation" in missing_hooks(GRPOTrainer, Old)
