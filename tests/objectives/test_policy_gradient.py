"""The policy gradient in value and gradient, with and without weights."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from buffer_wire.errors import InvalidField
from tests.objectives import reference
from tests.objectives.reference import TokenCase, TokenRule, assert_same, loss_and_gradient
from trainer_client.objectives import mis_weights, policy_gradient_loss, tis_weights


def times(weight: TokenRule, rule: TokenRule) -> TokenRule:
    """`rule` with both of its results multiplied by the first one of `weight`."""

    def both(*token: float) -> tuple[float, float]:
        w, (term, slope) = weight(*token)[0], rule(*token)
        return w * term, w * slope

    return both


def test_without_weights_it_is_reinforce(case: TokenCase) -> None:
    t = case.tensors()
    loss = policy_gradient_loss(t["logprobs"], t["advantages"], t["mask"])
    assert_same(loss, t["logprobs"], loss_and_gradient(case, reference.policy_gradient))


@pytest.mark.parametrize("cap", [1.0, 2.0])
def test_with_truncated_weights(case: TokenCase, cap: float) -> None:
    def capped(new: float, _old: float, behaviour: float, _advantage: float) -> tuple[float, float]:
        return min(math.exp(new - behaviour), cap), 0.0

    t = case.tensors()
    weights = tis_weights(t["logprobs"], t["behaviour"], t["mask"], cap=cap)
    loss = policy_gradient_loss(t["logprobs"], t["advantages"], t["mask"], weights=weights)
    assert_same(loss, t["logprobs"], loss_and_gradient(case, times(capped, reference.policy_gradient)))


def test_with_masked_weights_dropped_tokens_have_no_gradient_and_stay_in_the_denominator(case: TokenCase) -> None:
    def inside(new: float, _old: float, behaviour: float, _advantage: float) -> tuple[float, float]:
        ratio = math.exp(new - behaviour)
        return (ratio if 0.5 <= ratio <= 2.0 else 0.0), 0.0

    t = case.tensors()
    weights = mis_weights(t["logprobs"], t["behaviour"], t["mask"], low=0.5, high=2.0)
    assert ((weights == 0) & t["mask"]).any()
    loss = policy_gradient_loss(t["logprobs"], t["advantages"], t["mask"], weights=weights)
    assert_same(loss, t["logprobs"], loss_and_gradient(case, times(inside, reference.policy_gradient)))


def test_weights_multiply(case: TokenCase) -> None:
    t = case.tensors()
    one = tis_weights(t["logprobs"], t["behaviour"], t["mask"], cap=2.0)
    other = (mis_weights(t["logprobs"], t["old"], t["mask"], low=0.7, high=1.4) > 0).double()
    loss = policy_gradient_loss(t["logprobs"], t["advantages"], t["mask"], weights=one * other)
    only_other = t["mask"] & (other > 0)
    narrower = policy_gradient_loss(
        t["logprobs"], t["advantages"], only_other, weights=one, loss_tokens=int(t["mask"].sum())
    )
    assert loss.item() == pytest.approx(narrower.item(), rel=1e-12)


def test_no_gradient_flows_into_the_weights() -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    loss = policy_gradient_loss(logprobs, torch.ones(1), torch.tensor([True]), weights=logprobs.exp())
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient.item() == pytest.approx(-math.exp(-1.0))


def test_numbers_under_the_mask_reach_neither_value_nor_gradient(rng: np.random.Generator) -> None:
    case = TokenCase.random(rng, (4, 6))
    t = case.hidden_numbers_replaced(math.nan).tensors()
    loss = policy_gradient_loss(t["logprobs"], t["advantages"], t["mask"], weights=t["behaviour"] * 0 + 1)
    assert_same(loss, t["logprobs"], loss_and_gradient(case, reference.policy_gradient))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"logprobs": torch.zeros(2, 3, dtype=torch.float16)}, "logprobs.dtype"),
        ({"advantages": torch.zeros(6)}, "advantages.shape"),
        ({"loss_mask": torch.zeros(2, 3)}, "loss_mask.dtype"),
        ({"weights": torch.ones(2)}, "weights.shape"),
        ({"weights": torch.ones(2, 3, dtype=torch.int64)}, "weights.dtype"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], field: str) -> None:
    good: dict[str, Any] = {
        "logprobs": torch.zeros(2, 3),
        "advantages": torch.zeros(2, 3),
        "loss_mask": torch.ones(2, 3, dtype=torch.bool),
        "weights": torch.ones(2, 3),
    }
    policy_gradient_loss(**good)
    with pytest.raises(InvalidField) as error:
        policy_gradient_loss(**good | changes)
    assert error.value.attributes["field"] == field
