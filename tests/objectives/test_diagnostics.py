"""Ratio diagnostics against numpy."""

import numpy as np
import pytest
import torch

from buffer_wire.errors import InvalidField
from tests.objectives.reference import Array, TokenCase
from trainer_client.objectives import RatioDiagnostics, ratio_diagnostics, ratio_diagnostics_by_staleness


def check(log_ratio: Array, got: RatioDiagnostics) -> None:
    ratio = np.exp(log_ratio)
    assert got.tokens == len(ratio)
    assert got.ratio_mean == pytest.approx(ratio.mean(), rel=1e-12)
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
