"""Truncated importance sampling in value and gradient."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from buffer_wire.errors import InvalidField
from tests.objectives import reference
from tests.objectives.reference import TokenCase, assert_same, loss_and_gradient
from trainer_client.objectives import tis_policy_gradient_loss, tis_ppo_loss, tis_weights


def test_weights_are_the_capped_ratio_without_a_graph(case: TokenCase) -> None:
    t = case.tensors()
    weights = tis_weights(t["logprobs"], t["behaviour"], t["mask"], cap=2.0)
    expected = np.where(case.mask, np.minimum(np.exp(case.logprobs - case.behaviour), 2.0), 0.0)
    assert (expected == 2.0).any(), "the case caps some tokens"
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-12)
    assert not weights.requires_grad


@pytest.mark.parametrize("cap", [1.0, 2.0])
def test_policy_gradient_value_and_gradient_match_the_formula(case: TokenCase, cap: float) -> None:
    t = case.tensors()
    loss = tis_policy_gradient_loss(t["logprobs"], t["behaviour"], t["advantages"], t["mask"], cap=cap)
    assert_same(loss, t["logprobs"], loss_and_gradient(case, reference.tis_policy_gradient(cap)))


def test_ppo_value_and_gradient_match_the_formula(case: TokenCase) -> None:
    ratio, positive = np.exp(case.logprobs - case.old), case.advantages > 0
    for binding in (positive & (ratio > 1.3), ~positive & (ratio < 0.8), positive & (ratio < 0.8)):
        assert (binding & case.mask).any(), "the case has each kind of clipped and unclipped token"
    t = case.tensors()
    loss = tis_ppo_loss(
        t["logprobs"],
        t["old"],
        t["behaviour"],
        t["advantages"],
        t["mask"],
        cap=2.0,
        clip_low=0.2,
        clip_high=0.3,
    )
    assert_same(loss, t["logprobs"], loss_and_gradient(case, reference.tis_ppo(2.0, 0.2, 0.3)))


@pytest.mark.parametrize(
    ("ratio", "advantage", "term", "slope"),
    [
        (1.5, 1.0, 1.2, 0.0),
        (1.5, -1.0, -1.5, -1.5),
        (0.5, 1.0, 0.5, 0.5),
        (0.5, -1.0, -0.8, 0.0),
        (1.1, -1.0, -1.1, -1.1),
    ],
)
def test_ppo_by_hand_with_a_capped_weight(ratio: float, advantage: float, term: float, slope: float) -> None:
    old = torch.tensor([math.log(0.4)], dtype=torch.float64)
    behaviour = torch.tensor([math.log(0.1)], dtype=torch.float64)  # π_old / μ = 4, capped at 3
    logprobs = (old + math.log(ratio)).requires_grad_()
    loss = tis_ppo_loss(
        logprobs, old, behaviour, torch.tensor([advantage], dtype=torch.float64), torch.tensor([True]), cap=3.0
    )
    assert_same(loss, logprobs, (-3.0 * term, [-3.0 * slope]))


def policy_gradient(t: dict[str, torch.Tensor], total: int) -> torch.Tensor:
    return tis_policy_gradient_loss(t["logprobs"], t["behaviour"], t["advantages"], t["mask"], loss_tokens=total)


def ppo(t: dict[str, torch.Tensor], total: int) -> torch.Tensor:
    return tis_ppo_loss(t["logprobs"], t["old"], t["behaviour"], t["advantages"], t["mask"], loss_tokens=total)


@pytest.mark.parametrize(
    ("objective", "rule"),
    [(policy_gradient, reference.tis_policy_gradient(2.0)), (ppo, reference.tis_ppo(2.0, 0.2, 0.2))],
)
def test_shards_with_the_batch_total_add_up_to_the_whole(
    objective: Callable[[dict[str, torch.Tensor], int], torch.Tensor], rule: reference.TokenRule
) -> None:
    case = TokenCase.random(np.random.default_rng(3), (12, 7))
    expected = loss_and_gradient(case, rule)
    value, gradients = 0.0, []
    for rows in (slice(0, 5), slice(5, 6), slice(6, 12)):
        t = case.rows(rows).tensors()
        loss = objective(t, int(case.mask.sum()))
        value += loss.item()
        gradients.append(torch.autograd.grad(loss, t["logprobs"])[0].numpy())
    np.testing.assert_allclose(value, expected[0], rtol=1e-12)
    np.testing.assert_allclose(np.concatenate(gradients), expected[1], rtol=1e-12)


def test_numbers_under_the_mask_reach_neither_value_nor_gradient() -> None:
    case = TokenCase.random(np.random.default_rng(8), (4, 6))
    dirty = TokenCase(*(np.array(getattr(case, name)) for name in TokenCase.__slots__))
    for name in ("logprobs", "old", "behaviour", "advantages"):
        getattr(dirty, name)[~case.mask] = np.nan
    t = dirty.tensors()
    loss = tis_policy_gradient_loss(t["logprobs"], t["behaviour"], t["advantages"], t["mask"])
    assert_same(loss, t["logprobs"], loss_and_gradient(case, reference.tis_policy_gradient(2.0)))
    loss = tis_ppo_loss(t["logprobs"], t["old"], t["behaviour"], t["advantages"], t["mask"])
    assert_same(loss, t["logprobs"], loss_and_gradient(case, reference.tis_ppo(2.0, 0.2, 0.2)))


def test_a_ratio_beyond_float32_leaves_no_nan_in_the_gradient() -> None:
    logprobs = torch.tensor([-0.1], requires_grad=True)
    far, one, on = torch.tensor([-200.0]), torch.tensor([1.0]), torch.tensor([True])
    for loss in (
        tis_policy_gradient_loss(logprobs, far, one, on),
        tis_ppo_loss(logprobs, far, far, one, on),
    ):
        assert torch.isfinite(torch.autograd.grad(loss, logprobs)[0]).all()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"logprobs": torch.zeros(2, 3, dtype=torch.float16)}, "logprobs.dtype"),
        ({"old_logprobs": torch.zeros(2)}, "old_logprobs.shape"),
        ({"behaviour_logprobs": torch.zeros(6)}, "behaviour_logprobs.shape"),
        ({"advantages": torch.zeros(6)}, "advantages.shape"),
        ({"loss_mask": torch.zeros(2, 3)}, "loss_mask.dtype"),
        ({"cap": -1.0}, "cap"),
        ({"clip_low": 1.0}, "clip_low"),
        ({"clip_high": 0.0}, "clip_high"),
        ({"loss_tokens": -3}, "loss_tokens"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, object], field: str) -> None:
    good: dict[str, object] = {
        "logprobs": torch.zeros(2, 3),
        "old_logprobs": torch.zeros(2, 3),
        "behaviour_logprobs": torch.zeros(2, 3),
        "advantages": torch.zeros(2, 3),
        "loss_mask": torch.ones(2, 3, dtype=torch.bool),
    }
    tis_ppo_loss(**good)  # type: ignore[arg-type]
    with pytest.raises(InvalidField) as error:
        tis_ppo_loss(**good | changes)  # type: ignore[arg-type]
    assert error.value.attributes["field"] == field
