"""Every loss under every denominator: parts of a batch, cut at random between samples, add up to the whole."""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor

from buffer_wire.errors import InvalidField
from tests.objectives import reference
from tests.objectives.reference import (
    Mean,
    SampleRule,
    TokenCase,
    assert_same,
    mean_loss_and_gradient,
    of_tokens,
    weighted,
)
from trainer_client.objectives import (
    aipo_loss,
    cispo_loss,
    gspo_loss,
    mis_weights,
    policy_gradient_loss,
    ppo_loss,
    tis_weights,
)

Inputs: TypeAlias = dict[str, Any]
"""Tensors by role, and token_counts: None where they are padded."""


def aipo(t: Inputs, **mean: Any) -> Tensor:
    counts = t["token_counts"]
    return aipo_loss(t["logprobs"], t["behaviour"], t["advantages"], t["mask"], delta=2.0, token_counts=counts, **mean)


def tis_policy_gradient(t: Inputs, **mean: Any) -> Tensor:
    weights = tis_weights(t["logprobs"], t["behaviour"], t["mask"], cap=2.0)
    counts = t["token_counts"]
    return policy_gradient_loss(t["logprobs"], t["advantages"], t["mask"], weights=weights, token_counts=counts, **mean)


def mis_policy_gradient(t: Inputs, **mean: Any) -> Tensor:
    counts = t["token_counts"]
    weights = mis_weights(
        t["logprobs"], t["behaviour"], t["mask"], low=0.5, high=2.0, level="geometric", token_counts=counts
    )
    return policy_gradient_loss(t["logprobs"], t["advantages"], t["mask"], weights=weights, token_counts=counts, **mean)


def decoupled_ppo(t: Inputs, **mean: Any) -> Tensor:
    weights = tis_weights(t["old"], t["behaviour"], t["mask"], cap=5.0)
    counts = t["token_counts"]
    return ppo_loss(t["logprobs"], t["old"], t["advantages"], t["mask"], weights=weights, token_counts=counts, **mean)


def gspo(t: Inputs, **mean: Any) -> Tensor:
    counts = t["token_counts"]
    return gspo_loss(
        t["logprobs"],
        t["old"],
        t["advantages"],
        t["mask"],
        clip_low=0.1,
        clip_high=0.1,
        token_counts=counts,
        **mean,
    )


def cispo(t: Inputs, **mean: Any) -> Tensor:
    counts = t["token_counts"]
    return cispo_loss(t["logprobs"], t["old"], t["advantages"], t["mask"], clip_high=0.3, token_counts=counts, **mean)


OBJECTIVES: dict[str, tuple[Callable[..., Tensor], SampleRule]] = {
    "aipo": (aipo, of_tokens(reference.aipo_detached(2.0))),
    "tis policy gradient": (
        tis_policy_gradient,
        weighted(of_tokens(reference.policy_gradient), reference.truncated(2.0)),
    ),
    "mis policy gradient": (
        mis_policy_gradient,
        weighted(of_tokens(reference.policy_gradient), reference.masked(0.5, 2.0, level="geometric")),
    ),
    "decoupled ppo": (decoupled_ppo, weighted(of_tokens(reference.ppo(0.2, 0.2)), reference.truncated(5.0, "old"))),
    "gspo": (gspo, reference.gspo(0.1, 0.1)),
    "cispo": (cispo, of_tokens(reference.cispo(None, 0.3))),
}
EACH = pytest.mark.parametrize("objective", list(OBJECTIVES))


@pytest.fixture
def batch(rng: np.random.Generator) -> tuple[TokenCase, list[int]]:
    """14 samples of 1 to 11 tokens in [14, 11], padding is NaN; one sample has no loss token."""
    case = TokenCase.random(rng, (14, 11))
    lengths = [*rng.integers(1, 11, 13).tolist(), 11]
    mask = case.mask & (np.arange(11) < np.array(lengths)[:, None])
    mask[3] = False
    whole = TokenCase(case.logprobs, case.old, case.behaviour, case.advantages, mask)
    return whole.hidden_numbers_replaced(np.nan), lengths


def padded(case: TokenCase, lengths: list[int], rows: list[int]) -> Inputs:
    return {**case.rows(rows).tensors(), "token_counts": None}


def packed(case: TokenCase, lengths: list[int], rows: list[int]) -> Inputs:
    names = ("logprobs", "old", "behaviour", "advantages", "mask")
    joined = TokenCase(*(np.concatenate([getattr(case, name)[r, : lengths[r]] for r in rows]) for name in names))
    return {**joined.tensors(), "token_counts": torch.tensor([lengths[r] for r in rows])}


def unpacked(gradient: Tensor, lengths: list[int], rows: list[int], width: int) -> Tensor:
    """A gradient in the layout of `padded` or `packed` as [rows, width]."""
    if gradient.ndim == 2:
        return gradient
    parts = torch.split(gradient, [lengths[r] for r in rows])
    return torch.stack([torch.nn.functional.pad(part, (0, width - len(part))) for part in parts])


@EACH
@pytest.mark.parametrize("layout", [padded, packed])
@pytest.mark.parametrize("mean", ["loss_tokens", "total_samples"])
def test_random_shards_add_up_to_the_reference(
    batch: tuple[TokenCase, list[int]],
    rng: np.random.Generator,
    objective: str,
    layout: Callable[[TokenCase, list[int], list[int]], Inputs],
    mean: Mean,
) -> None:
    case, lengths = batch
    function, rule = OBJECTIVES[objective]
    total = int(case.mask.sum()) if mean == "loss_tokens" else len(lengths)
    expected = mean_loss_and_gradient(case, rule, mean, total)
    for _ in range(6):
        # Rows in any order, cut into 1 to 14 shards, as ranks and micro-batches would.
        order = rng.permutation(len(lengths))
        cuts = np.sort(rng.choice(np.arange(1, len(lengths)), rng.integers(0, len(lengths)), replace=False))
        value, gradient = 0.0, torch.zeros(case.mask.shape, dtype=torch.float64)
        for shard in np.split(order, cuts):
            rows = shard.tolist()
            inputs = layout(case, lengths, rows)
            loss = function(inputs, **{mean: total})
            value += loss.item()
            part = torch.autograd.grad(loss, inputs["logprobs"])[0]
            gradient[rows] += unpacked(part, lengths, rows, case.mask.shape[1])
        np.testing.assert_allclose(value, expected[0], rtol=1e-12)
        np.testing.assert_allclose(gradient.numpy(), expected[1], rtol=1e-11, atol=1e-15)


@EACH
def test_streamed_micro_batches_may_be_divided_at_the_end(batch: tuple[TokenCase, list[int]], objective: str) -> None:
    case, lengths = batch
    function, rule = OBJECTIVES[objective]
    total = int(case.mask.sum())
    logprobs = torch.tensor(case.logprobs, requires_grad=True)
    for rows in ([0, 1, 2], [3], list(range(4, 14))):
        inputs = padded(case, lengths, rows)
        function({**inputs, "logprobs": logprobs[rows]}, loss_tokens=1).backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    expected = mean_loss_and_gradient(case, rule, "loss_tokens", total)[1]
    np.testing.assert_allclose((logprobs.grad / total).numpy(), expected, rtol=1e-11, atol=1e-15)


@EACH
def test_dr_grpos_constant_is_a_count_of_tokens(batch: tuple[TokenCase, list[int]], objective: str) -> None:
    case, lengths = batch
    function, rule = OBJECTIVES[objective]
    inputs = padded(case, lengths, list(range(14)))
    length = 100  # L: each sample's sum over L, then the mean over samples
    expected = 0.0
    for sample in case.samples():
        expected -= sum(term for term, _ in rule(sample)) / length / 14
    assert function(inputs, loss_tokens=14 * length).item() == pytest.approx(expected, rel=1e-12)


@EACH
def test_totals_may_be_scalar_tensors(batch: tuple[TokenCase, list[int]], objective: str) -> None:
    case, lengths = batch
    function, rule = OBJECTIVES[objective]
    for mean in ("loss_tokens", "total_samples"):
        inputs = padded(case, lengths, list(range(14)))
        loss = function(inputs, **{mean: torch.tensor(37)})
        assert_same(loss, inputs["logprobs"], mean_loss_and_gradient(case, rule, mean, 37.0))


@EACH
def test_no_loss_token_gives_zero_loss_and_gradient(batch: tuple[TokenCase, list[int]], objective: str) -> None:
    case, lengths = batch
    function, _ = OBJECTIVES[objective]
    for mean in ({}, {"loss_tokens": 10}, {"total_samples": 10}):
        inputs = padded(case, lengths, [3])
        assert_same(function(inputs, **mean), inputs["logprobs"], (0.0, np.zeros((1, 11))))


@pytest.mark.parametrize("smooth", ["aipo", "ppo", "policy gradient"])
def test_gradcheck_of_what_is_the_derivative_of_its_value(rng: np.random.Generator, smooth: str) -> None:
    t = TokenCase.random(rng, (3, 5)).tensors()
    inputs = (t["advantages"], t["mask"])
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "aipo": lambda x: aipo_loss(x, t["behaviour"], *inputs, delta=2.0, reading="ratio_differentiated"),
        "ppo": lambda x: ppo_loss(x, t["old"], *inputs, weights=t["behaviour"].exp(), total_samples=3),
        "policy gradient": lambda x: policy_gradient_loss(x, *inputs, weights=t["behaviour"].exp()),
    }
    assert torch.autograd.gradcheck(functions[smooth], (t["logprobs"],))


@pytest.mark.parametrize(
    ("mean", "field"),
    [
        ({"loss_tokens": 0}, "loss_tokens"),
        ({"loss_tokens": float("nan")}, "loss_tokens"),
        ({"loss_tokens": torch.ones(2)}, "loss_tokens.shape"),
        ({"total_samples": -1}, "total_samples"),
        ({"total_samples": torch.ones(1)}, "total_samples.shape"),
        ({"loss_tokens": 6, "total_samples": 2}, "total_samples"),
    ],
)
@EACH
def test_bad_denominators_are_named(
    batch: tuple[TokenCase, list[int]], objective: str, mean: Inputs, field: str
) -> None:
    function, _ = OBJECTIVES[objective]
    with pytest.raises(InvalidField) as error:
        function(padded(*batch, [0, 1]), **mean)
    assert error.value.attributes["field"] == field


@EACH
def test_a_sample_mean_over_packed_tokens_needs_their_counts(
    batch: tuple[TokenCase, list[int]], objective: str
) -> None:
    function, _ = OBJECTIVES[objective]
    with pytest.raises(InvalidField, match="token_counts"):
        function({**packed(*batch, [0, 1]), "token_counts": None}, total_samples=2)
