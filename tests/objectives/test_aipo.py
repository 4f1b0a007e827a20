"""AIPO in value and gradient, both readings."""

import math

import numpy as np
import pytest
import torch

from buffer_wire.errors import InvalidField
from tests.objectives import reference
from tests.objectives.reference import TokenCase, assert_same, loss_and_gradient
from trainer_client.objectives import AipoReading, aipo_loss

READINGS = {
    "ratio_detached": reference.aipo_detached,
    "ratio_differentiated": reference.aipo_differentiated,
}
BOTH = pytest.mark.parametrize("reading", list(READINGS))


@BOTH
@pytest.mark.parametrize("delta", [0.5, 1.0, 4.0])
def test_value_and_gradient_match_the_formula(case: TokenCase, reading: AipoReading, delta: float) -> None:
    ratio = np.exp(case.logprobs - case.behaviour)[case.mask]
    assert (ratio > delta).any(), "the case clips some tokens"
    assert (ratio < delta).any(), "the case leaves some tokens unclipped"
    assert (case.advantages[case.mask] < 0).any()
    t = case.tensors()
    loss = aipo_loss(t["logprobs"], t["behaviour"], t["advantages"], t["mask"], delta=delta, reading=reading)
    assert_same(loss, t["logprobs"], loss_and_gradient(case, READINGS[reading](delta)))


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize(("reading", "slope_of_clipped"), [("ratio_detached", 2.0), ("ratio_differentiated", 0.0)])
def test_readings_differ_only_in_the_gradient_of_clipped_tokens(
    advantage: float, reading: AipoReading, slope_of_clipped: float
) -> None:
    # Ratios 3 (clipped at δ = 2) and 0.5 (not clipped).
    logprobs = torch.tensor([math.log(0.6), math.log(0.1)], dtype=torch.float64, requires_grad=True)
    behaviour = torch.tensor([math.log(0.2), math.log(0.2)], dtype=torch.float64)
    loss = aipo_loss(
        logprobs,
        behaviour,
        torch.full((2,), advantage, dtype=torch.float64),
        torch.ones(2, dtype=torch.bool),
        delta=2.0,
        reading=reading,
    )
    assert_same(
        loss,
        logprobs,
        (-advantage * (2.0 + 0.5) / 2, [-advantage * slope_of_clipped / 2, -advantage * 0.5 / 2]),
    )


@BOTH
def test_shards_with_the_batch_total_add_up_to_the_whole(reading: AipoReading) -> None:
    case = TokenCase.random(np.random.default_rng(3), (12, 7))
    total = int(case.mask.sum())
    expected = loss_and_gradient(case, READINGS[reading](2.0))
    losses, gradients = 0.0, []
    # Unequal shards, as token balancing makes them.
    for rows in (slice(0, 2), slice(2, 3), slice(3, 12)):
        t = case.rows(rows).tensors()
        loss = aipo_loss(
            t["logprobs"],
            t["behaviour"],
            t["advantages"],
            t["mask"],
            delta=2.0,
            reading=reading,
            loss_tokens=total,
        )
        losses += loss.item()
        gradients.append(torch.autograd.grad(loss, t["logprobs"])[0].numpy())
    np.testing.assert_allclose(losses, expected[0], rtol=1e-12)
    np.testing.assert_allclose(np.concatenate(gradients), expected[1], rtol=1e-12)


def test_total_may_be_a_scalar_tensor() -> None:
    case = TokenCase.random(np.random.default_rng(4), (3, 4))
    t = case.tensors()
    loss = aipo_loss(
        t["logprobs"],
        t["behaviour"],
        t["advantages"],
        t["mask"],
        delta=2.0,
        loss_tokens=torch.tensor(100, dtype=torch.int64),
    )
    assert_same(loss, t["logprobs"], loss_and_gradient(case, reference.aipo_detached(2.0), 100))


@BOTH
def test_padded_and_packed_agree(reading: AipoReading) -> None:
    case = TokenCase.random(np.random.default_rng(5), (4, 6))
    losses = []
    for shape in (case, case.packed()):
        t = shape.tensors()
        losses.append(
            aipo_loss(t["logprobs"], t["behaviour"], t["advantages"], t["mask"], delta=2.0, reading=reading).item()
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-14)


def test_one_advantage_per_sample_reaches_all_its_tokens() -> None:
    case = TokenCase.random(np.random.default_rng(6), (5, 4))
    per_sample = np.array([1.0, -2.0, 0.0, 0.5, -0.1])
    spread = TokenCase(case.logprobs, case.old, case.behaviour, np.repeat(per_sample[:, None], 4, axis=1), case.mask)
    t = case.tensors()
    loss = aipo_loss(t["logprobs"], t["behaviour"], torch.tensor(per_sample), t["mask"], delta=2.0)
    assert_same(loss, t["logprobs"], loss_and_gradient(spread, reference.aipo_detached(2.0)))


@BOTH
def test_numbers_under_the_mask_reach_neither_value_nor_gradient(reading: AipoReading) -> None:
    case = TokenCase.random(np.random.default_rng(8), (4, 6))
    hidden = ~case.mask
    dirty = TokenCase(*(np.array(getattr(case, name)) for name in TokenCase.__slots__))
    dirty.logprobs[hidden] = np.nan
    dirty.behaviour[hidden] = -np.inf
    dirty.advantages[hidden] = np.inf
    t = dirty.tensors()
    loss = aipo_loss(t["logprobs"], t["behaviour"], t["advantages"], t["mask"], delta=2.0, reading=reading)
    assert_same(loss, t["logprobs"], loss_and_gradient(case, READINGS[reading](2.0)))


@BOTH
def test_a_ratio_beyond_float32_is_clipped_without_nan(reading: AipoReading) -> None:
    logprobs = torch.tensor([-0.1], requires_grad=True)
    loss = aipo_loss(
        logprobs, torch.tensor([-200.0]), torch.tensor([1.0]), torch.tensor([True]), delta=4.0, reading=reading
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss.item() == pytest.approx(-4.0)
    assert gradient.item() == pytest.approx(-4.0 if reading == "ratio_detached" else 0.0)


def test_float32_agrees_with_float64_to_its_precision(case: TokenCase) -> None:
    t = case.tensors(torch.float32)
    loss = aipo_loss(t["logprobs"], t["behaviour"], t["advantages"], t["mask"], delta=2.0)
    assert loss.dtype == torch.float32
    expected = loss_and_gradient(case, reference.aipo_detached(2.0))
    np.testing.assert_allclose(loss.item(), expected[0], rtol=1e-4, atol=1e-6)


def test_no_loss_token_gives_zero_loss_and_gradient() -> None:
    t = TokenCase.random(np.random.default_rng(9), (2, 3)).tensors()
    loss = aipo_loss(t["logprobs"], t["behaviour"], t["advantages"], torch.zeros(2, 3, dtype=torch.bool), delta=2.0)
    assert_same(loss, t["logprobs"], (0.0, np.zeros((2, 3))))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"logprobs": torch.zeros(2, 3, 4)}, "logprobs.shape"),
        ({"logprobs": torch.zeros(2, 3, dtype=torch.bfloat16)}, "logprobs.dtype"),
        ({"behaviour_logprobs": torch.zeros(3, 2)}, "behaviour_logprobs.shape"),
        ({"behaviour_logprobs": torch.zeros(2, 3, dtype=torch.int64)}, "behaviour_logprobs.dtype"),
        ({"advantages": torch.zeros(3)}, "advantages.shape"),
        ({"advantages": torch.zeros(2, dtype=torch.int64)}, "advantages.dtype"),
        ({"loss_mask": torch.ones(2, dtype=torch.bool)}, "loss_mask.shape"),
        ({"loss_mask": torch.ones(2, 3)}, "loss_mask.dtype"),
        ({"delta": 0.0}, "delta"),
        ({"delta": math.inf}, "delta"),
        ({"loss_tokens": 0}, "loss_tokens"),
        ({"loss_tokens": torch.ones(2)}, "loss_tokens.shape"),
        ({"reading": "sideways"}, "reading"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, object], field: str) -> None:
    good: dict[str, object] = {
        "logprobs": torch.zeros(2, 3),
        "behaviour_logprobs": torch.zeros(2, 3),
        "advantages": torch.zeros(2),
        "loss_mask": torch.ones(2, 3, dtype=torch.uint8),
        "delta": 2.0,
    }
    aipo_loss(**good)  # type: ignore[arg-type]
    with pytest.raises(InvalidField) as error:
        aipo_loss(**good | changes)  # type: ignore[arg-type]
    assert error.value.attributes["field"] == field
