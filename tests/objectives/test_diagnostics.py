"""Ratio diagnostics and clip fractions against numpy; their sums over parts of a batch against the whole."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from buffer_wire.errors import InvalidField
from tests.objectives import reference
from tests.objectives.reference import Array, TokenCase
from trainer_client.objectives import (
    RatioDiagnostics,
    RatioSums,
    clip_fraction,
    gspo_loss,
    merged_by_staleness,
    mis_weights,
    ppo_loss,
    ratio_diagnostics,
    ratio_diagnostics_by_staleness,
    ratio_sums,
    ratio_sums_by_staleness,
)


def check(log_ratio: Array, got: RatioDiagnostics) -> None:
    ratio = np.exp(log_ratio)
    assert got.tokens == len(ratio)
    assert got.ratio_mean == pytest.approx(ratio.mean(), rel=1e-12)
    assert got.ratio_min == pytest.approx(ratio.min(), rel=1e-12)
    assert got.ratio_max == pytest.approx(ratio.max(), rel=1e-12)
    assert got.effective_sample_size == pytest.approx(ratio.sum() ** 2 / (ratio**2).sum(), rel=1e-12)
    assert got.kl_behaviour == pytest.approx((ratio - 1 - log_ratio).mean(), rel=1e-12)


def test_figures_match_their_formulas(case: TokenCase) -> None:
    t = case.tensors()
    check((case.logprobs - case.behaviour)[case.mask], ratio_diagnostics(t["logprobs"], t["behaviour"], t["mask"]))


def test_the_same_policy_is_perfect() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -3.0]])
    got = ratio_diagnostics(logprobs, logprobs, torch.tensor([[0, 1, 1]]))
    assert (got.tokens, got.ratio_mean, got.ratio_max, got.kl_behaviour) == (2, 1.0, 1.0, 0.0)
    assert got.effective_fraction == pytest.approx(1.0)


def test_k3_by_hand() -> None:
    # ρ = 1/2: 1/2 − 1 + log 2.
    got = ratio_diagnostics(torch.tensor([np.log(0.1)]), torch.tensor([np.log(0.2)]), torch.tensor([True]))
    assert got.kl_behaviour == pytest.approx(np.log(2.0) - 0.5)


def test_one_dominating_token_leaves_an_effective_sample_of_one() -> None:
    got = ratio_diagnostics(torch.tensor([400.0, 0.0]), torch.tensor([-200.0, 0.0]), torch.tensor([True, True]))
    assert got.effective_sample_size == pytest.approx(1.0)


def test_buckets_partition_the_tokens_by_staleness(case: TokenCase) -> None:
    t = case.tensors()
    staleness = torch.arange(case.logprobs.size).reshape(case.logprobs.shape) % 11
    got = ratio_diagnostics_by_staleness(t["logprobs"], t["behaviour"], t["mask"], staleness)
    assert list(got) == ["0", "1", "2", "3", "4-7", "8+"]
    for label, low, high in (("0", 0, 0), ("1", 1, 1), ("4-7", 4, 7), ("8+", 8, 99)):
        inside = case.mask & (staleness.numpy() >= low) & (staleness.numpy() <= high)
        check((case.logprobs - case.behaviour)[inside], got[label])
    assert sum(bucket.tokens for bucket in got.values()) == case.mask.sum()


def test_staleness_may_be_given_per_sample_and_empty_buckets_are_left_out() -> None:
    case = TokenCase.random(np.random.default_rng(1), (3, 8))
    t = case.tensors()
    got = ratio_diagnostics_by_staleness(t["logprobs"], t["behaviour"], t["mask"], torch.tensor([2, 0, 2]))
    assert list(got) == ["0", "2"]
    check((case.logprobs - case.behaviour)[1][case.mask[1]], got["0"])


def test_no_token_gives_zeros() -> None:
    zeros = torch.zeros(2, 3)
    got = ratio_diagnostics(zeros, zeros, zeros.bool())
    assert (got.tokens, got.effective_fraction) == (0, 0.0)
    assert ratio_diagnostics_by_staleness(zeros, zeros, zeros.bool(), torch.zeros(2, dtype=torch.int64)) == {}


# ── sums ─────────────────────────────────────────────────────────────────────


def test_sums_of_parts_give_the_figures_of_the_whole(rng: np.random.Generator) -> None:
    case = TokenCase.random(rng, (12, 9))
    for _ in range(5):
        cuts = np.sort(rng.choice(np.arange(1, 12), rng.integers(0, 6), replace=False))
        parts = []
        for rows in np.split(rng.permutation(12), cuts):
            t = case.rows(rows.tolist()).tensors()
            parts.append(ratio_sums(t["logprobs"], t["behaviour"], t["mask"]))
        check((case.logprobs - case.behaviour)[case.mask], sum(parts, RatioSums()).summary())


def test_no_token_is_the_neutral_element(case: TokenCase) -> None:
    t = case.tensors()
    sums = ratio_sums(t["logprobs"], t["behaviour"], t["mask"])
    nothing = ratio_sums(t["logprobs"], t["behaviour"], torch.zeros_like(t["mask"]))
    assert nothing == nothing + nothing == RatioSums()
    assert sums + nothing == sums == nothing + sums
    assert nothing.summary() == RatioDiagnostics(0, 0.0, 0.0, 0.0, 0.0, 0.0)


def test_sums_by_staleness_are_merged_bucket_by_bucket_youngest_first(rng: np.random.Generator) -> None:
    case = TokenCase.random(rng, (12, 9))
    staleness = rng.integers(0, 14, (12, 9))
    staleness[6:] = 12  # the first part has the oldest bucket alone
    parts = []
    for rows in (slice(6, 12), slice(0, 1), slice(1, 6)):
        t = case.rows(rows).tensors()
        ages = torch.tensor(staleness[rows])
        parts.append(ratio_sums_by_staleness(t["logprobs"], t["behaviour"], t["mask"], ages, lower_bounds=(0, 3, 10)))
    merged = merged_by_staleness(parts)
    assert list(merged) == ["0-2", "3-9", "10+"]
    for label, low, high in (("0-2", 0, 2), ("3-9", 3, 9), ("10+", 10, 99)):
        inside = case.mask & (staleness >= low) & (staleness <= high)
        check((case.logprobs - case.behaviour)[inside], merged[label].summary())
    assert merged_by_staleness([]) == {}


def test_one_dominating_token_in_one_part_does_not_overflow_the_sum() -> None:
    def part(train: float, behaviour: float) -> RatioSums:
        on = torch.tensor([True])
        return ratio_sums(torch.tensor([train]).double(), torch.tensor([behaviour]).double(), on)

    got = (part(400.0, -200.0) + part(0.0, 0.0)).summary()
    assert got.effective_sample_size == pytest.approx(1.0)
    assert got.ratio_mean == pytest.approx(math.exp(600) / 2, rel=1e-9)
    assert (part(800.0, 0.0) + part(0.0, 0.0)).summary().ratio_max == math.inf


def test_a_token_that_the_policy_cannot_make_any_more_has_ratio_zero() -> None:
    never = torch.tensor([-math.inf])
    got = ratio_sums(never, torch.zeros(1), torch.tensor([True])).summary()
    assert (got.ratio_mean, got.ratio_max, got.effective_sample_size) == (0.0, 0.0, 0.0)
    assert got.kl_behaviour == math.inf


# ── clip fraction ────────────────────────────────────────────────────────────


def test_the_clip_fraction_is_the_share_of_tokens_outside(case: TokenCase) -> None:
    t = case.tensors()
    ratio = np.exp(case.logprobs - case.behaviour)[case.mask]
    got = clip_fraction(t["logprobs"], t["behaviour"], t["mask"], low=0.5, high=2.0)
    assert got == pytest.approx(((ratio < 0.5) | (ratio > 2.0)).mean(), rel=1e-12)
    assert clip_fraction(t["logprobs"], t["behaviour"], t["mask"], high=2.0) == pytest.approx((ratio > 2.0).mean())
    assert clip_fraction(t["logprobs"], t["behaviour"], t["mask"]) == 0.0


def test_with_advantages_it_counts_the_tokens_that_ppo_gives_no_gradient(case: TokenCase) -> None:
    t = case.tensors()
    loss = ppo_loss(t["logprobs"], t["old"], t["advantages"], t["mask"], clip_low=0.2, clip_high=0.3)
    (gradient,) = torch.autograd.grad(loss, t["logprobs"])
    without = ((gradient == 0) & t["mask"]).sum() / t["mask"].sum()
    assert 0.05 < without < 0.95
    got = clip_fraction(t["logprobs"], t["old"], t["mask"], low=0.8, high=1.3, advantages=t["advantages"])
    assert got == pytest.approx(without.item())


def test_at_the_geometric_level_it_counts_the_tokens_that_gspo_gives_no_gradient(rng: np.random.Generator) -> None:
    t = TokenCase.random(rng, (32, 9)).one_advantage_a_sample().tensors()
    loss = gspo_loss(t["logprobs"], t["old"], t["advantages"], t["mask"], clip_low=0.1, clip_high=0.1)
    (gradient,) = torch.autograd.grad(loss, t["logprobs"])
    without = ((gradient == 0) & t["mask"]).sum() / t["mask"].sum()
    assert 0.05 < without < 0.95
    got = clip_fraction(
        t["logprobs"], t["old"], t["mask"], low=0.9, high=1.1, advantages=t["advantages"][:, 0], level="geometric"
    )
    assert got == pytest.approx(without.item())


def test_at_the_sequence_level_it_counts_the_tokens_that_mis_drops(rng: np.random.Generator) -> None:
    case = TokenCase.random(rng, (32, 9))
    t = case.packed().tensors()
    where: dict[str, Any] = {"level": "sequence", "token_counts": torch.full((32,), 9)}
    weights = mis_weights(t["logprobs"], t["behaviour"], t["mask"], low=0.1, high=10.0, **where)
    got = clip_fraction(t["logprobs"], t["behaviour"], t["mask"], low=0.1, high=10.0, **where)
    dropped = ((weights == 0) & t["mask"]).sum() / t["mask"].sum()
    assert got == pytest.approx(dropped.item())
    kept = sum(sum(w > 0 for w in reference.masked(0.1, 10.0, level="sequence")(s)) for s in case.samples())
    assert got == pytest.approx(1 - kept / case.mask.sum())


def test_clip_fractions_of_parts_add_up(rng: np.random.Generator) -> None:
    case = TokenCase.random(rng, (12, 9))
    whole, total, shares = case.tensors(), int(case.mask.sum()), 0.0
    for rows in (slice(0, 5), slice(5, 6), slice(6, 12)):
        t = case.rows(rows).tensors()
        shares += clip_fraction(t["logprobs"], t["behaviour"], t["mask"], low=0.5, high=2.0, loss_tokens=total)
    assert shares == pytest.approx(
        clip_fraction(whole["logprobs"], whole["behaviour"], whole["mask"], low=0.5, high=2.0), rel=1e-12
    )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"reference_logprobs": torch.zeros(3, 2)}, "reference_logprobs.shape"),
        ({"low": 2.0, "high": 1.0}, "high"),
        ({"level": "batch"}, "level"),
        ({"advantages": torch.zeros(3)}, "advantages.shape"),
        ({"loss_tokens": 0}, "loss_tokens"),
    ],
)
def test_bad_arguments_of_the_clip_fraction_are_named(changes: dict[str, Any], field: str) -> None:
    good: dict[str, Any] = {
        "logprobs": torch.zeros(2, 3),
        "reference_logprobs": torch.zeros(2, 3),
        "loss_mask": torch.ones(2, 3, dtype=torch.bool),
    }
    clip_fraction(**good)
    with pytest.raises(InvalidField) as error:
        clip_fraction(**good | changes)
    assert error.value.attributes["field"] == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"staleness": torch.zeros(2)}, "staleness.dtype"),
        ({"staleness": torch.zeros(5, dtype=torch.int64)}, "staleness.shape"),
        ({"staleness": torch.tensor([0, -1])}, "staleness"),
        ({"lower_bounds": (1, 2)}, "lower_bounds"),
        ({"lower_bounds": (0, 2, 2)}, "lower_bounds"),
        ({"lower_bounds": ()}, "lower_bounds"),
        ({"loss_mask": torch.ones(3, 2, dtype=torch.bool)}, "loss_mask.shape"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, object], field: str) -> None:
    good: dict[str, object] = {
        "logprobs": torch.zeros(2, 3),
        "behaviour_logprobs": torch.zeros(2, 3),
        "loss_mask": torch.ones(2, 3, dtype=torch.bool),
        "staleness": torch.tensor([0, 1]),
    }
    ratio_diagnostics_by_staleness(**good)  # type: ignore[arg-type]
    with pytest.raises(InvalidField) as error:
        ratio_diagnostics_by_staleness(**good | changes)  # type: ignore[arg-type]
    assert error.value.attributes["field"] == field
