"""Truncated and masked importance weights at every level, against plain python."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from buffer_wire.errors import InvalidField
from tests.objectives import reference
from tests.objectives.reference import Array, TokenCase, WeightRule
from trainer_client.objectives import RatioLevel, mis_weights, tis_weights, trust_weights

LEVELS: list[RatioLevel] = ["token", "sequence", "geometric"]


@pytest.fixture
def near(rng: np.random.Generator) -> TokenCase:
    """24 samples of nine tokens whose sequence ratios lie on both sides of 1/2 and 2; the last has no loss token."""
    case = TokenCase.random(rng, (24, 9))
    mask = case.mask.copy()
    mask[-1] = False
    return TokenCase(
        case.logprobs, case.old, case.logprobs + (case.behaviour - case.logprobs) / 3, case.advantages, mask
    )


def expected_weights(case: TokenCase, rule: WeightRule) -> Array:
    out = np.zeros(case.mask.shape)
    for row, sample in enumerate(case.samples()):
        out[row, case.mask[row]] = rule(sample)
    return out


@pytest.mark.parametrize("level", LEVELS)
def test_tis_is_the_capped_ratio_without_a_graph(near: TokenCase, level: RatioLevel) -> None:
    t = near.tensors()
    weights = tis_weights(t["logprobs"], t["behaviour"], t["mask"], cap=1.25, level=level)
    expected = expected_weights(near, reference.truncated(1.25, level=level))
    assert (expected == 1.25).any(), "the case caps some tokens"
    assert ((expected > 0) & (expected < 1.25)).any(), "the case leaves others"
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-12)
    assert not weights.requires_grad


@pytest.mark.parametrize("level", LEVELS)
def test_mis_drops_what_lies_outside_and_leaves_the_rest(near: TokenCase, level: RatioLevel) -> None:
    t = near.tensors()
    weights = mis_weights(t["logprobs"], t["behaviour"], t["mask"], low=0.8, high=1.3, level=level)
    expected = expected_weights(near, reference.masked(0.8, 1.3, level=level))
    ratio = expected_weights(near, reference.truncated(math.inf, level=level))[near.mask]
    for kind in (ratio < 0.8, ratio > 1.3, (ratio > 0.8) & (ratio < 1.3)):
        assert kind.any(), "the case has tokens on each side of the bounds"
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-12)
    assert not weights.requires_grad


@pytest.mark.parametrize("level", LEVELS)
def test_padded_and_packed_agree(near: TokenCase, level: RatioLevel) -> None:
    padded, packed = near.tensors(), near.packed().tensors()
    counts = torch.full((24,), 9)
    for weights in (tis_weights, mis_weights):
        bounds: dict[str, Any] = {"cap": 2.0} if weights is tis_weights else {}
        one = weights(padded["logprobs"], padded["behaviour"], padded["mask"], level=level, **bounds)
        two = weights(
            packed["logprobs"], packed["behaviour"], packed["mask"], level=level, token_counts=counts, **bounds
        )
        np.testing.assert_allclose(one.reshape(-1).numpy(), two.numpy(), rtol=1e-12)


def test_levels_by_hand() -> None:
    # Ratios 4 and 1 over the mask: product 4, geometric mean 2; the masked token's ratio of 9 counts nowhere.
    train = torch.tensor([[0.0, 0.0, 0.0]], dtype=torch.float64)
    behaviour = torch.tensor([[-math.log(4.0), -math.log(9.0), 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 0, 1]])
    for level, ratio in (("sequence", 4.0), ("geometric", 2.0)):
        for weights in (
            tis_weights(train, behaviour, mask, cap=math.inf, level=level),  # type: ignore[arg-type]
            mis_weights(train, behaviour, mask, low=ratio - 1e-9, high=ratio + 1e-9, level=level),  # type: ignore[arg-type]
        ):
            np.testing.assert_allclose(weights.numpy(), [[ratio, 0.0, ratio]], rtol=1e-12)


def test_bounds_themselves_are_inside() -> None:
    train, on = torch.tensor([math.log(2.0), math.log(0.5)], dtype=torch.float64), torch.tensor([True, True])
    weights = mis_weights(train, torch.zeros(2, dtype=torch.float64), on, low=0.5, high=2.0)
    np.testing.assert_allclose(weights.numpy(), [2.0, 0.5], rtol=1e-12)


def test_one_sided_bounds() -> None:
    train, zero, on = torch.tensor([-50.0, 0.0, 50.0]), torch.zeros(3), torch.ones(3, dtype=torch.bool)
    np.testing.assert_allclose(
        mis_weights(train, zero, on, low=0.0, high=5.0).numpy(), [math.exp(-50), 1, 0], rtol=1e-6
    )
    np.testing.assert_allclose(
        mis_weights(train, zero, on, low=0.5, high=math.inf).numpy(), [0, 1, math.exp(50)], rtol=1e-6
    )


def test_a_ratio_beyond_float32_is_bounded() -> None:
    far, on = torch.tensor([-200.0]), torch.tensor([True])
    assert tis_weights(torch.zeros(1), far, on, cap=4.0).item() == pytest.approx(4.0)
    assert mis_weights(torch.zeros(1), far, on).item() == 0.0


def test_numbers_under_the_mask_do_not_count(near: TokenCase) -> None:
    clean, dirty = near.tensors(), near.hidden_numbers_replaced(math.nan).tensors()
    for level in LEVELS:
        one, two = (mis_weights(t["logprobs"], t["behaviour"], t["mask"], level=level) for t in (clean, dirty))
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"train_logprobs": torch.zeros(2, 3, dtype=torch.float16)}, "train_logprobs.dtype"),
        ({"behaviour_logprobs": torch.zeros(6)}, "behaviour_logprobs.shape"),
        ({"loss_mask": torch.zeros(2, 3)}, "loss_mask.dtype"),
        ({"low": -0.1}, "low"),
        ({"low": 2.0}, "high"),
        ({"high": math.nan}, "high"),
        ({"level": "batch"}, "level"),
        ({"level": "sequence", "token_counts": torch.tensor([3, 3])}, "token_counts"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], field: str) -> None:
    good: dict[str, Any] = {
        "train_logprobs": torch.zeros(2, 3),
        "behaviour_logprobs": torch.zeros(2, 3),
        "loss_mask": torch.ones(2, 3, dtype=torch.bool),
    }
    mis_weights(**good)
    with pytest.raises(InvalidField) as error:
        mis_weights(**good | changes)
    assert error.value.attributes["field"] == field


@pytest.mark.parametrize("cap", [0.0, -1.0, math.nan])
def test_the_cap_must_be_positive(cap: float) -> None:
    with pytest.raises(InvalidField, match="cap"):
        tis_weights(torch.zeros(1), torch.zeros(1), torch.tensor([True]), cap=cap)


@pytest.mark.parametrize(
    "token_counts", [None, torch.tensor([3, 4]), torch.tensor([7, -1]), torch.tensor([[6]]), torch.tensor([6.0])]
)
def test_packed_samples_must_be_told_apart(token_counts: torch.Tensor | None) -> None:
    with pytest.raises(InvalidField, match="token_counts"):
        mis_weights(
            torch.zeros(6),
            torch.zeros(6),
            torch.ones(6, dtype=torch.bool),
            level="geometric",
            token_counts=token_counts,
        )


# ── rejection of samples ─────────────────────────────────────────────────────


@pytest.fixture
def probable(near: TokenCase) -> TokenCase:
    """Make the same with log-probabilities only."""
    return TokenCase(near.logprobs, near.old, np.minimum(near.behaviour, -0.01), near.advantages, near.mask)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_samples_beyond_the_trust_region_are_rejected_whole(probable: TokenCase, packed: bool) -> None:
    t = (probable.packed() if packed else probable).tensors()
    counts = torch.full((24,), 9) if packed else None
    weights = trust_weights(t["logprobs"], t["behaviour"], t["mask"], delta=0.03, token_counts=counts)
    expected = expected_weights(probable, reference.trusted(0.03))
    kept = expected.max(axis=1)
    assert 0 < kept.sum() < len(kept), "the case has samples on both sides"
    np.testing.assert_array_equal(weights.reshape(24, 9).numpy(), expected)
    assert not weights.requires_grad


def test_divergence_by_hand() -> None:
    # Of 0.5 and 0.25: 0.5 log 2 + 0.5 log (0.5 / 0.75); the second token, equal in both, halves the mean.
    behaviour = torch.log(torch.tensor([[0.5, 0.3, 0.9]], dtype=torch.float64))
    train = torch.log(torch.tensor([[0.25, 0.3, 0.1]], dtype=torch.float64))
    mask = torch.tensor([[1, 1, 0]])
    mean = (0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)) / 2
    assert trust_weights(train, behaviour, mask, delta=mean + 1e-9).tolist() == [[1, 1, 0]]
    assert trust_weights(train, behaviour, mask, delta=mean - 1e-9).tolist() == [[0, 0, 0]]


def test_certain_tokens_that_differ_by_rounding_are_trusted() -> None:
    train, behaviour = torch.tensor([[0.0, -1e-7, -1.0]]), torch.tensor([[-1e-7, 0.0, -1.0]])
    assert trust_weights(train, behaviour, torch.ones(1, 3, dtype=torch.bool), delta=1e-6).tolist() == [[1, 1, 1]]
    # A token that had become impossible is not.
    gone = torch.tensor([[-200.0, -1e-7, -1.0]])
    assert trust_weights(gone, behaviour, torch.ones(1, 3, dtype=torch.bool), delta=1.0).tolist() == [[0, 0, 0]]


def test_numbers_under_the_mask_do_not_count_for_trust(probable: TokenCase) -> None:
    clean, dirty = probable.tensors(), probable.hidden_numbers_replaced(math.nan).tensors()
    weights = [trust_weights(t["logprobs"], t["behaviour"], t["mask"], delta=0.03) for t in (clean, dirty)]
    np.testing.assert_array_equal(weights[0].numpy(), weights[1].numpy())


@pytest.mark.parametrize("delta", [0.0, -1.0, math.nan, math.inf])
def test_trust_needs_a_bound(delta: float) -> None:
    with pytest.raises(InvalidField, match="delta"):
        trust_weights(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), delta=delta)


def test_packed_samples_have_to_be_told_apart_for_trust() -> None:
    with pytest.raises(InvalidField, match="token_counts"):
        trust_weights(torch.zeros(4), torch.zeros(4), torch.ones(4, dtype=torch.bool), delta=1.0)
