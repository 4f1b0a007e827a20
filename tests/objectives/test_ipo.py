"""IPO and DPPO's mask by sign, in value and gradient."""

import math

import numpy as np
import pytest
import torch

from buffer_wire.errors import InvalidField
from tests.objectives import reference
from tests.objectives.reference import TokenCase, assert_same, loss_and_gradient
from trainer_client.objectives import ipo_loss

BOTH = pytest.mark.parametrize("by_sign", [False, True])


@BOTH
@pytest.mark.parametrize(("low", "high", "kl"), [(0.2, 0.2, 1e-3), (0.05, 0.3, 0.0), (math.inf, math.inf, 0.1)])
def test_value_and_gradient_match_the_formula(
    case: TokenCase, low: float, high: float, kl: float, by_sign: bool
) -> None:
    t = case.tensors()
    loss = ipo_loss(
        t["logprobs"], t["behaviour"], t["advantages"], t["mask"], mask_low=low, mask_high=high, kl=kl, by_sign=by_sign
    )
    moved = (np.exp(case.logprobs) - np.exp(case.behaviour))[case.mask]
    if math.isfinite(low):
        assert (moved > high).any(), "the case has tokens beyond each bound"
        assert (moved < -low).any()
        assert ((moved > -low) & (moved < high)).any()
    assert_same(loss, t["logprobs"], loss_and_gradient(case, reference.ipo(low, high, kl, by_sign=by_sign)))


@pytest.mark.parametrize(
    ("probability", "advantage", "symmetric", "signed"),
    [(0.8, 1.0, 0.0, 1.6), (0.8, -1.0, 0.0, -1.6), (0.2, 1.0, 0.0, 0.4), (0.2, -1.0, 0.0, -0.4), (0.6, 1.0, 1.2, 1.2)],
)
def test_mask_by_sign_leaves_out_only_what_goes_further_out(
    probability: float, advantage: float, symmetric: float, signed: float
) -> None:
    further_out = (probability - 0.5) * advantage > 0.2
    for by_sign, gained in ((False, symmetric), (True, 0.0 if further_out else signed)):
        loss = ipo_loss(
            torch.tensor([math.log(probability)], dtype=torch.float64),
            torch.tensor([math.log(0.5)], dtype=torch.float64),
            torch.tensor([advantage], dtype=torch.float64),
            torch.tensor([True]),
            kl=0.0,
            by_sign=by_sign,
        )
        assert -loss.item() == pytest.approx(gained)


def test_what_is_left_out_stays_in_the_denominator_and_keeps_its_kl() -> None:
    logprobs = torch.tensor([math.log(0.9), math.log(0.5)], dtype=torch.float64)
    behaviour = torch.tensor([math.log(0.3), math.log(0.5)], dtype=torch.float64)
    loss = ipo_loss(logprobs, behaviour, torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.bool), kl=0.5)
    assert loss.item() == pytest.approx((0.5 * math.log(3.0) ** 2 - 1.0) / 2)


@BOTH
def test_shards_with_the_batch_total_add_up_to_the_whole(by_sign: bool) -> None:
    case = TokenCase.random(np.random.default_rng(3), (12, 7))
    expected = loss_and_gradient(case, reference.ipo(0.2, 0.2, 1e-3, by_sign=by_sign))
    losses, gradients = 0.0, []
    for rows in (slice(0, 2), slice(2, 3), slice(3, 12)):
        t = case.rows(rows).tensors()
        total = int(case.mask.sum())
        loss = ipo_loss(t["logprobs"], t["behaviour"], t["advantages"], t["mask"], by_sign=by_sign, loss_tokens=total)
        losses += loss.item()
        gradients.append(torch.autograd.grad(loss, t["logprobs"])[0].numpy())
    np.testing.assert_allclose(losses, expected[0], rtol=1e-12)
    np.testing.assert_allclose(np.concatenate(gradients), expected[1], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("hidden", [math.nan, math.inf])
def test_numbers_under_the_mask_reach_neither_value_nor_gradient(hidden: float) -> None:
    case = TokenCase.random(np.random.default_rng(8), (4, 6))
    t = case.hidden_numbers_replaced(hidden).tensors()
    loss = ipo_loss(t["logprobs"], t["behaviour"], t["advantages"], t["mask"])
    assert_same(loss, t["logprobs"], loss_and_gradient(case, reference.ipo(0.2, 0.2, 1e-3, by_sign=False)))


def test_a_ratio_beyond_float32_leaves_no_nan() -> None:
    logprobs = torch.tensor([-2.0], requires_grad=True)
    loss = ipo_loss(logprobs, torch.tensor([-200.0]), torch.tensor([1.0]), torch.tensor([True]))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"mask_low": -0.1}, "mask_low"),
        ({"mask_high": math.nan}, "mask_high"),
        ({"kl": -1.0}, "kl"),
        ({"kl": math.inf}, "kl"),
        ({"logprobs": torch.zeros(2, 3, dtype=torch.bfloat16)}, "logprobs.dtype"),
        ({"behaviour_logprobs": torch.zeros(3, 2)}, "behaviour_logprobs.shape"),
        ({"advantages": torch.zeros(3)}, "advantages.shape"),
        ({"loss_tokens": 0}, "loss_tokens"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, object], field: str) -> None:
    good: dict[str, object] = {
        "logprobs": torch.zeros(2, 3),
        "behaviour_logprobs": torch.zeros(2, 3),
        "advantages": torch.zeros(2),
        "loss_mask": torch.ones(2, 3, dtype=torch.uint8),
    }
    ipo_loss(**good)  # type: ignore[arg-type]
    with pytest.raises(InvalidField) as error:
        ipo_loss(**good | changes)  # type: ignore[arg-type]
    assert error.value.attributes["field"] == field
