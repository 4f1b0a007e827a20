"""The learner: arrays in, one optimizer step, metrics out; checkpoints; and that it learns from old policies."""

import copy
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from buffer_wire.errors import InvalidField
from examples.demo.learner import Learner, LearnerConfig, TrainBatch
from examples.demo.model import build_model, load_model
from examples.demo.tasks import MAX_ANSWER_TOKENS, ChainSums
from tests.demo_parts.sampler import rollout
from trainer_client.objectives import selected_logprobs


@pytest.fixture
def batch(model: Qwen3ForCausalLM) -> TrainBatch:
    """12 tasks of one to three terms × 4 samples, of the model itself."""
    tasks = list(islice(ChainSums(seed=8, max_terms=3).stream(), 12))
    return rollout(model, tasks, 4, MAX_ANSWER_TOKENS, torch.Generator().manual_seed(1))[0]


def weights(model: Qwen3ForCausalLM) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_on_policy_the_engines_and_the_learners_probabilities_agree(model: Qwen3ForCausalLM, batch: TrainBatch) -> None:
    metrics = Learner(model).step(batch)
    assert metrics.ratio.ratio_mean == pytest.approx(1.0, abs=1e-5)
    assert metrics.ratio.ratio_max == pytest.approx(1.0, abs=1e-4)
    assert metrics.ratio_by_staleness.keys() == {"0"}
    assert metrics.loss_tokens == int(torch.as_tensor(batch.loss_mask).sum())
    assert metrics.grad_norm > 0
    assert 0 < metrics.entropy < np.log(64)
    assert metrics.step == 1


@pytest.mark.parametrize("objective", ["aipo", "tis"])
def test_a_step_makes_rewarded_samples_likelier_and_others_less(
    model: Qwen3ForCausalLM, batch: TrainBatch, objective: str
) -> None:
    def loglikelihood() -> torch.Tensor:
        token_ids = torch.as_tensor(batch.token_ids)
        with torch.no_grad():
            logprobs = selected_logprobs(model(input_ids=token_ids).logits, token_ids)
        return torch.where(torch.as_tensor(batch.loss_mask), logprobs, 0.0).sum(dim=1)

    advantages = torch.as_tensor(batch.advantages)
    assert (advantages > 0).any()
    before = loglikelihood()
    Learner(model, LearnerConfig(objective=objective)).step(batch)  # type: ignore[arg-type]
    change = loglikelihood() - before
    assert (change * advantages).sum() > 0
    assert change[advantages > 0].mean() > 0


def test_padding_changes_nothing(model: Qwen3ForCausalLM, batch: TrainBatch) -> None:
    wider = TrainBatch(
        token_ids=torch.nn.functional.pad(torch.as_tensor(batch.token_ids), (0, 5), value=7),
        prompt_len=batch.prompt_len,
        loss_mask=torch.nn.functional.pad(torch.as_tensor(batch.loss_mask), (0, 5)),
        behaviour_logprobs=torch.nn.functional.pad(
            torch.as_tensor(batch.behaviour_logprobs), (0, 5), value=float("nan")
        ),
        advantages=batch.advantages,
    )
    other = copy.deepcopy(model)
    one, two = Learner(model).step(batch), Learner(other).step(wider)
    assert one.loss == pytest.approx(two.loss, abs=1e-7)
    torch.testing.assert_close(weights(model), weights(other), rtol=0, atol=1e-6)


def test_read_only_numpy_arrays_are_taken_as_they_come(model: Qwen3ForCausalLM, batch: TrainBatch) -> None:
    def frozen(array: object, dtype: str) -> np.ndarray:
        values = np.asarray(array).astype(dtype)
        return np.frombuffer(values.tobytes(), dtype).reshape(values.shape)

    other = copy.deepcopy(model)
    arrays = TrainBatch(
        token_ids=frozen(batch.token_ids, "int64"),
        prompt_len=frozen(batch.prompt_len, "int64"),
        loss_mask=frozen(batch.loss_mask, "uint8"),
        behaviour_logprobs=frozen(batch.behaviour_logprobs, "float32"),
        advantages=frozen(batch.advantages, "float32"),
        staleness=frozen(batch.staleness, "int64"),
    )
    assert Learner(other).step(arrays).loss == Learner(model).step(batch).loss
    assert torch.equal(weights(model), weights(other))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"token_ids": np.zeros((48, 12), np.int32)}, "token_ids.dtype"),
        ({"token_ids": np.zeros(48, np.int64)}, "token_ids.shape"),
        ({"prompt_len": np.ones(47, np.int64)}, "prompt_len.shape"),
        ({"prompt_len": np.zeros(48, np.int64)}, "prompt_len"),
        ({"loss_mask": np.ones((48, 3), np.uint8)}, "loss_mask.shape"),
        ({"behaviour_logprobs": np.zeros((48, 12), np.float64)}, "behaviour_logprobs.dtype"),
        ({"advantages": np.zeros((48, 12), np.float32)}, "advantages.shape"),
        ({"staleness": np.zeros(48, np.float32)}, "staleness.dtype"),
    ],
)
def test_bad_arrays_are_named_and_change_no_weight(
    model: Qwen3ForCausalLM, batch: TrainBatch, changes: dict[str, object], field: str
) -> None:
    learner, before = Learner(model), weights(model).clone()
    with pytest.raises(InvalidField) as error:
        learner.step(replace(batch, **changes))  # type: ignore[arg-type]
    assert error.value.attributes["field"] == field
    assert torch.equal(weights(model), before)
    assert learner.steps == 0


def test_a_mask_inside_the_prompt_is_refused(model: Qwen3ForCausalLM, batch: TrainBatch) -> None:
    mask = torch.as_tensor(batch.loss_mask).clone()
    mask[3, 0] = True
    with pytest.raises(InvalidField, match="loss_mask"):
        Learner(model).step(replace(batch, loss_mask=mask))


def test_exported_weights_are_those_of_the_last_step(
    model: Qwen3ForCausalLM, batch: TrainBatch, tmp_path: Path
) -> None:
    learner = Learner(model)
    learner.step(batch)
    learner.export_weights(tmp_path / "1")
    first = weights(model).clone()
    learner.step(batch)
    learner.export_weights(tmp_path / "2")
    assert torch.equal(weights(load_model(tmp_path / "1")), first)
    assert torch.equal(weights(load_model(tmp_path / "2")), weights(model))
    assert not torch.equal(weights(model), first)


def test_after_a_checkpoint_training_goes_on_as_if_nothing_had_happened(
    model: Qwen3ForCausalLM, batch: TrainBatch, tmp_path: Path
) -> None:
    learner = Learner(model)
    learner.step(batch)
    learner.save_checkpoint(tmp_path / "state" / "checkpoint.pt")
    learner.step(batch)

    resumed = Learner(build_model(seed=99))
    resumed.load_checkpoint(tmp_path / "state" / "checkpoint.pt")
    assert resumed.steps == 1
    resumed.step(batch)
    assert torch.equal(weights(resumed.model), weights(model))
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["checkpoint.pt"]


def test_a_checkpoint_of_other_settings_is_refused(model: Qwen3ForCausalLM, tmp_path: Path) -> None:
    Learner(model).save_checkpoint(tmp_path / "checkpoint.pt")
    with pytest.raises(InvalidField, match="learning_rate"):
        Learner(model, LearnerConfig(learning_rate=1.0)).load_checkpoint(tmp_path / "checkpoint.pt")
    with pytest.raises(FileNotFoundError):
        Learner(model).load_checkpoint(tmp_path / "none.pt")


def test_reward_rises_on_samples_of_policies_two_versions_old(model: Qwen3ForCausalLM) -> None:
    learner, behaviour = Learner(model), copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    tasks = ChainSums(seed=21).stream()
    history, rewards = [copy.deepcopy(model.state_dict())], []
    for _ in range(30):
        old = history[-3:][0]
        behaviour.load_state_dict(old)
        batch, reward = rollout(behaviour, list(islice(tasks, 32)), 8, MAX_ANSWER_TOKENS, generator, staleness=2)
        learner.step(batch)
        rewards.append(reward)
        history.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    assert sum(rewards[-5:]) / 5 >= sum(rewards[:5]) / 5 + 0.1
