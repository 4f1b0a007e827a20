"""GSPO and GSPO-token in value and gradient."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from buffer_wire.errors import InvalidField
from tests.objectives import reference
from tests.objectives.reference import TokenCase, assert_same, mean_loss_and_gradient
from trainer_client.objectives import gspo_loss, per_token

CLIPS: dict[str, Any] = {"clip_low": 0.15, "clip_high": 0.1}


@pytest.fixture
def sequences(rng: np.random.Generator) -> TokenCase:
    """32 samples of nine tokens, one advantage each; the last has no loss token."""
    case = TokenCase.random(rng, (32, 9)).one_advantage_a_sample()
    mask = case.mask.copy()
    mask[-1] = False
    return TokenCase(case.logprobs, case.old, case.behaviour, case.advantages, mask)


def written_out(case: TokenCase, logprobs: Tensor) -> Tensor:
    """Equation 5 as it stands, for autograd to differentiate through s_i."""
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(case.mask)):
        counted = torch.tensor(case.mask[row])
        if counted.any():
            difference = logprobs[row][counted] - torch.tensor(case.old[row])[counted]
            s = torch.exp(difference.sum() / counted.sum())
            advantage = float(case.advantages[row, 0])
            clipped = s.clamp(1 - CLIPS["clip_low"], 1 + CLIPS["clip_high"])
            total = total + torch.minimum(s * advantage, clipped * advantage)
    return -total / len(case.mask)


def test_value_and_gradient_are_those_of_the_sequence_objective(sequences: TokenCase) -> None:
    ratio = np.array([reference.ratios(s, "new", "geometric")[0] if s else 1.0 for s in _against_old(sequences)])
    positive = sequences.advantages[:, 0] > 0
    for kind in (positive & (ratio > 1.1), ~positive & (ratio < 0.85), (ratio > 0.85) & (ratio < 1.1)):
        assert kind.any(), "the case has clipped and unclipped sequences"
    t = sequences.tensors()
    loss = gspo_loss(t["logprobs"], t["old"], t["advantages"][:, 0], t["mask"], **CLIPS)
    expected = written_out(sequences, t["logprobs"])
    (gradient,) = torch.autograd.grad(expected, t["logprobs"])
    assert_same(loss, t["logprobs"], (expected.item(), gradient.numpy()))


def _against_old(case: TokenCase) -> list[list[reference.Token]]:
    swapped = TokenCase(case.logprobs, case.behaviour, case.old, case.advantages, case.mask)
    return list(swapped.samples())


def test_with_advantages_of_tokens_it_is_gspo_token(rng: np.random.Generator) -> None:
    case = TokenCase.random(rng, (32, 9))
    t = case.tensors()
    loss = gspo_loss(t["logprobs"], t["old"], t["advantages"], t["mask"], **CLIPS)
    rule = reference.gspo(CLIPS["clip_low"], CLIPS["clip_high"])
    assert_same(loss, t["logprobs"], mean_loss_and_gradient(case, rule, "total_samples", 32.0))


def test_by_hand() -> None:
    # Ratios 2 and 1/8 of two tokens: s = (2 / 8)^(1/2) = 1/2.
    logprobs = torch.tensor([[math.log(0.8), math.log(0.1)]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[math.log(0.4), math.log(0.8)]], dtype=torch.float64)
    on = torch.ones(1, 2, dtype=torch.bool)
    loss = gspo_loss(logprobs, old, torch.tensor([3.0], dtype=torch.float64), on)
    assert_same(loss, logprobs, (-1.5, [[-0.75, -0.75]]))
    loss = gspo_loss(logprobs, old, torch.tensor([-3.0], dtype=torch.float64), on, clip_low=0.4)
    assert_same(loss, logprobs, (1.8, [[0.0, 0.0]]))


def test_gradcheck_through_the_sequence_ratio(sequences: TokenCase) -> None:
    t = sequences.tensors()
    assert torch.autograd.gradcheck(
        lambda logprobs: gspo_loss(logprobs, t["old"], t["advantages"][:, 0], t["mask"], **CLIPS), (t["logprobs"],)
    )


def test_packed_samples_are_told_apart_by_their_token_counts(sequences: TokenCase) -> None:
    padded, packed = sequences.tensors(), sequences.packed().tensors()
    counts = torch.full((32,), 9)
    one = gspo_loss(padded["logprobs"], padded["old"], padded["advantages"][:, 0], padded["mask"], **CLIPS)
    two = gspo_loss(
        packed["logprobs"],
        packed["old"],
        per_token(padded["advantages"][:, 0], counts),
        packed["mask"],
        token_counts=counts,
        **CLIPS,
    )
    (gradient,) = torch.autograd.grad(one, padded["logprobs"])
    assert_same(two, packed["logprobs"], (one.item(), gradient.reshape(-1).numpy()))


def test_numbers_under_the_mask_reach_neither_value_nor_gradient(sequences: TokenCase) -> None:
    t, dirty = sequences.tensors(), sequences.hidden_numbers_replaced(math.nan).tensors()
    one = gspo_loss(t["logprobs"], t["old"], t["advantages"], t["mask"])
    two = gspo_loss(dirty["logprobs"], dirty["old"], dirty["advantages"], dirty["mask"])
    (gradient,) = torch.autograd.grad(one, t["logprobs"])
    assert_same(two, dirty["logprobs"], (one.item(), gradient.numpy()))


def test_the_papers_clip_is_felt_in_float32() -> None:
    old, on = torch.full((1, 4096), -2.0), torch.ones(1, 4096, dtype=torch.bool)
    for drift, clipped in ((2e-4, False), (6e-4, True)):
        logprobs = (old + drift).requires_grad_()
        loss = gspo_loss(logprobs, old, torch.ones(1), on)
        assert loss.item() == pytest.approx(-1 - min(drift, 4e-4), abs=1e-6)
        assert torch.autograd.grad(loss, logprobs)[0].eq(0).all().item() is clipped


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"old_logprobs": torch.zeros(3, 2)}, "old_logprobs.shape"),
        ({"token_counts": torch.tensor([3, 3])}, "token_counts"),
        ({"clip_low": 0.0}, "clip_low"),
        ({"total_samples": 0}, "total_samples"),
        ({"total_samples": 2, "loss_tokens": 6}, "total_samples"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], field: str) -> None:
    good: dict[str, Any] = {
        "logprobs": torch.zeros(2, 3),
        "old_logprobs": torch.zeros(2, 3),
        "advantages": torch.zeros(2),
        "loss_mask": torch.ones(2, 3, dtype=torch.bool),
    }
    gspo_loss(**good)
    with pytest.raises(InvalidField) as error:
        gspo_loss(**good | changes)
    assert error.value.attributes["field"] == field


def test_packed_tokens_without_counts_are_refused() -> None:
    zeros = torch.zeros(6)
    with pytest.raises(InvalidField, match="token_counts"):
        gspo_loss(zeros, zeros, zeros, torch.ones(6, dtype=torch.bool))
