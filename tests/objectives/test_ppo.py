"""PPO, coupled and decoupled, in value and gradient; and the proximal policy by interpolation."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from buffer_wire.errors import InvalidField
from tests.objectives import reference
from tests.objectives.reference import TokenCase, WeightRule, assert_same, loss_and_gradient, mean_loss_and_gradient
from trainer_client.objectives import interpolated_logprobs, mis_weights, ppo_loss, tis_weights


def test_without_weights_it_is_the_clipped_surrogate(case: TokenCase) -> None:
    ratio, positive = np.exp(case.logprobs - case.old), case.advantages > 0
    for kind in (
        positive & (ratio > 1.3),
        ~positive & (ratio < 0.8),
        positive & (ratio < 0.8),
        ~positive & (ratio > 1.3),
    ):
        assert (kind & case.mask).any(), "the case has each kind of clipped and unclipped token"
    t = case.tensors()
    loss = ppo_loss(t["logprobs"], t["old"], t["advantages"], t["mask"], clip_low=0.2, clip_high=0.3)
    assert_same(loss, t["logprobs"], loss_and_gradient(case, reference.ppo(0.2, 0.3)))


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("uncapped", reference.truncated(math.inf, "old")),
        ("capped", reference.truncated(2.0, "old")),
        ("masked above", reference.masked(0.0, 5.0, "old")),
        ("masked sequences", reference.masked(0.3, 3.0, "old", "geometric")),
    ],
)
def test_decoupled_the_weight_is_of_the_proximal_over_the_behaviour_policy(
    rng: np.random.Generator, kind: str, rule: WeightRule
) -> None:
    case = TokenCase.random(rng, (6, 9))
    t = case.tensors()
    policies = (t["old"], t["behaviour"], t["mask"])
    weights = {
        "uncapped": lambda: tis_weights(*policies, cap=math.inf),
        "capped": lambda: tis_weights(*policies, cap=2.0),
        "masked above": lambda: mis_weights(*policies, low=0.0, high=5.0),
        "masked sequences": lambda: mis_weights(*policies, low=0.3, high=3.0, level="geometric"),
    }[kind]()
    loss = ppo_loss(t["logprobs"], t["old"], t["advantages"], t["mask"], weights=weights)
    expected = reference.weighted(reference.of_tokens(reference.ppo(0.2, 0.2)), rule)
    assert_same(loss, t["logprobs"], mean_loss_and_gradient(case, expected, "loss_tokens", float(case.mask.sum())))


def test_before_the_first_step_the_decoupled_gradient_is_the_importance_weighted_one(case: TokenCase) -> None:
    # θ = θ_prox: r = 1, so ∂J/∂log π_t = π_θ / π_behav · Â_t, whatever the clip.
    t = case.tensors()
    old = t["logprobs"].detach()
    weights = tis_weights(old, t["behaviour"], t["mask"], cap=math.inf)
    loss = ppo_loss(t["logprobs"], old, t["advantages"], t["mask"], weights=weights, clip_low=0.01, clip_high=0.01)
    (gradient,) = torch.autograd.grad(loss, t["logprobs"])
    ratio = np.exp(case.logprobs - case.behaviour)
    expected = np.where(case.mask, -ratio * case.advantages / case.mask.sum(), 0.0)
    np.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-12)


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
def test_by_hand_with_a_capped_weight(ratio: float, advantage: float, term: float, slope: float) -> None:
    old = torch.tensor([math.log(0.4)], dtype=torch.float64)
    behaviour = torch.tensor([math.log(0.1)], dtype=torch.float64)  # π_old / μ = 4, capped at 3
    on = torch.tensor([True])
    logprobs = (old + math.log(ratio)).requires_grad_()
    loss = ppo_loss(
        logprobs,
        old,
        torch.tensor([advantage], dtype=torch.float64),
        on,
        weights=tis_weights(old, behaviour, on, cap=3.0),
    )
    assert_same(loss, logprobs, (-3.0 * term, [-3.0 * slope]))


def test_numbers_under_the_mask_reach_neither_value_nor_gradient(rng: np.random.Generator) -> None:
    case = TokenCase.random(rng, (4, 6))
    t = case.hidden_numbers_replaced(math.nan).tensors()
    loss = ppo_loss(t["logprobs"], t["old"], t["advantages"], t["mask"], weights=t["behaviour"] * 0 + 1)
    assert_same(loss, t["logprobs"], loss_and_gradient(case, reference.ppo(0.2, 0.2)))


def test_a_ratio_beyond_float32_leaves_no_nan_in_the_gradient() -> None:
    logprobs = torch.tensor([-0.1], requires_grad=True)
    far, on = torch.tensor([-200.0]), torch.tensor([True])
    loss = ppo_loss(logprobs, far, torch.tensor([1.0]), on, weights=tis_weights(far, far, on, cap=2.0))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss.item() == pytest.approx(-1.2)
    assert gradient.item() == 0.0


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"logprobs": torch.zeros(2, 3, dtype=torch.float16)}, "logprobs.dtype"),
        ({"old_logprobs": torch.zeros(2)}, "old_logprobs.shape"),
        ({"weights": torch.zeros(6)}, "weights.shape"),
        ({"advantages": torch.zeros(6)}, "advantages.shape"),
        ({"loss_mask": torch.zeros(2, 3)}, "loss_mask.dtype"),
        ({"clip_low": 1.0}, "clip_low"),
        ({"clip_high": 0.0}, "clip_high"),
        ({"loss_tokens": -3}, "loss_tokens"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], field: str) -> None:
    good: dict[str, Any] = {
        "logprobs": torch.zeros(2, 3),
        "old_logprobs": torch.zeros(2, 3),
        "advantages": torch.zeros(2, 3),
        "loss_mask": torch.ones(2, 3, dtype=torch.bool),
    }
    ppo_loss(**good)
    with pytest.raises(InvalidField) as error:
        ppo_loss(**good | changes)
    assert error.value.attributes["field"] == field


def test_the_interpolated_policy_is_one_version_behind_the_one_in_training(case: TokenCase) -> None:
    versions = np.random.default_rng(2).integers(3, 11, case.mask.shape)  # of 10, the version in training
    t = case.tensors()
    got = interpolated_logprobs(t["logprobs"], t["behaviour"], torch.tensor(10 - versions))
    assert not got.requires_grad
    for index in np.ndindex(case.mask.shape):
        behaviour, new, made_by = case.behaviour[index], case.logprobs[index], versions[index]
        if made_by >= 9:
            expected = behaviour
        else:
            share = (9 - made_by) / (10 - made_by)  # of the way from made_by to 10, where version 9 lies
            expected = behaviour + share * (new - behaviour)
        assert got[index].item() == pytest.approx(expected, rel=1e-12)


def test_staleness_of_the_interpolation_may_be_given_per_sample() -> None:
    zero, two = torch.zeros(2, 3), torch.full((2, 3), 2.0)
    got = interpolated_logprobs(two, zero, torch.tensor([1, 4]))
    assert got.tolist() == [[0.0] * 3, [1.5] * 3]


@pytest.mark.parametrize("staleness", [torch.zeros(2), torch.zeros(3, dtype=torch.int64)])
def test_bad_staleness_is_named(staleness: torch.Tensor) -> None:
    with pytest.raises(InvalidField, match="staleness"):
        interpolated_logprobs(torch.zeros(2, 3), torch.zeros(2, 3), staleness)
