"""CISPO in value and gradient."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from buffer_wire.errors import InvalidField
from tests.objectives import reference
from tests.objectives.reference import TokenCase, assert_same, loss_and_gradient
from trainer_client.objectives import aipo_loss, cispo_loss, tis_weights


@pytest.mark.parametrize("clip_low", [None, 0.3])
def test_value_and_gradient_match_the_formula(case: TokenCase, clip_low: float | None) -> None:
    ratio = np.exp(case.logprobs - case.old)[case.mask]
    assert (ratio < 0.7).any(), "the case has tokens beyond either bound"
    assert (ratio > 1.4).any()
    t = case.tensors()
    loss = cispo_loss(t["logprobs"], t["old"], t["advantages"], t["mask"], clip_low=clip_low, clip_high=0.4)
    assert_same(loss, t["logprobs"], loss_and_gradient(case, reference.cispo(clip_low, 0.4)))


def test_every_token_keeps_a_gradient_beyond_the_clip() -> None:
    # Ratios 4 and 1/4, clipped to 1.5 and 0.5.
    logprobs = torch.tensor([math.log(0.4), math.log(0.1)], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([math.log(0.1), math.log(0.4)], dtype=torch.float64)
    loss = cispo_loss(
        logprobs, old, torch.tensor([1.0, -1.0]).double(), torch.tensor([1, 1]), clip_low=0.5, clip_high=0.5
    )
    expected = -(1.5 * math.log(0.4) - 0.5 * math.log(0.1)) / 2
    assert_same(loss, logprobs, (expected, [-0.75, 0.25]))


def test_without_lower_bound_its_gradient_is_that_of_aipo(case: TokenCase) -> None:
    t = case.tensors()
    inputs = (t["logprobs"], t["behaviour"], t["advantages"], t["mask"])
    (one,) = torch.autograd.grad(cispo_loss(*inputs, clip_high=1.0), t["logprobs"])
    (other,) = torch.autograd.grad(aipo_loss(*inputs, delta=2.0), t["logprobs"])
    np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-12, atol=1e-15)


def test_weights_correct_for_who_generated(case: TokenCase) -> None:
    def rule(new: float, old: float, behaviour: float, advantage: float) -> tuple[float, float]:
        term, slope = reference.cispo(None, 0.4)(new, old, behaviour, advantage)
        weight = min(math.exp(old - behaviour), 2.0)
        return weight * term, weight * slope

    t = case.tensors()
    weights = tis_weights(t["old"], t["behaviour"], t["mask"], cap=2.0)
    loss = cispo_loss(t["logprobs"], t["old"], t["advantages"], t["mask"], clip_high=0.4, weights=weights)
    assert_same(loss, t["logprobs"], loss_and_gradient(case, rule))


def test_numbers_under_the_mask_and_ratios_beyond_float32_are_harmless() -> None:
    logprobs = torch.tensor([-0.1, math.nan], requires_grad=True)
    loss = cispo_loss(
        logprobs, torch.tensor([-200.0, math.nan]), torch.ones(2), torch.tensor([True, False]), clip_high=1.0
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss.item() == pytest.approx(0.2)
    assert gradient.tolist() == pytest.approx([-2.0, 0.0])


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"old_logprobs": torch.zeros(3, 2)}, "old_logprobs.shape"),
        ({"weights": torch.zeros(2)}, "weights.shape"),
        ({"clip_low": 1.0}, "clip_low"),
        ({"clip_high": -0.2}, "clip_high"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], field: str) -> None:
    good: dict[str, Any] = {
        "logprobs": torch.zeros(2, 3),
        "old_logprobs": torch.zeros(2, 3),
        "advantages": torch.zeros(2),
        "loss_mask": torch.ones(2, 3, dtype=torch.bool),
        "clip_high": 0.2,
    }
    cispo_loss(**good)
    with pytest.raises(InvalidField) as error:
        cispo_loss(**good | changes)
    assert error.value.attributes["field"] == field
