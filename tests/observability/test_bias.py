"""Trained beside sampled: ratios, and when a difference is beyond chance."""

from math import sqrt

import pytest

from buffer_service.domain.ops import Amount
from buffer_service.observability.estimate import estimate
from buffer_service.observability.estimate.bias import compared
from buffer_wire.estimate import Bias, Comparison
from tests.support.views import make_loop


def of(bias: Bias, name: str) -> Comparison:
    return next(one for one in (*bias.comparisons, *bias.environments) if one.name == name)


def loop(**ratios: float) -> Bias:
    """A loop whose trained totals are so many times as large."""
    window = make_loop().window
    assert window is not None
    grown = {f"assembled_{name}": round(ratio * window.grown(f"assembled_{name}")) for name, ratio in ratios.items()}
    return estimate(make_loop(grown=grown)).bias


def test_means_and_ratios_are_those_of_the_sums() -> None:
    bias = loop(response_tokens=0.9, longest_tokens=0.8, reward_milli=1.2, turns=1.5, truncated_samples=2)
    assert (bias.sampled_groups, bias.trained_groups) == (320, 320)
    length = of(bias, "mean_length")
    assert (length.sampled, length.trained, length.ratio) == (1_000, 900, 0.9)
    assert of(bias, "mean_longest").trained == pytest.approx(1_200)
    reward = of(bias, "mean_reward")
    assert (reward.sampled, reward.trained) == (0.5, 0.6)
    assert of(bias, "mean_turns").trained == 1.5
    truncated = of(bias, "truncated_share")
    assert (truncated.sampled, truncated.trained) == (1 / 16, 1 / 8)


def test_a_difference_is_a_bias_beyond_three_standard_errors_of_the_groups() -> None:
    # Rewards of mean 0.5 and within -1 to 1 have a deviation of √(1 - 0.5²) at most.
    limit = 3 * sqrt(0.75) / sqrt(320)
    beyond, within = loop(reward_milli=1 + 2.3 * limit), loop(reward_milli=1 + 1.7 * limit)
    assert of(beyond, "mean_reward").biased
    assert not of(within, "mean_reward").biased
    assert of(within, "mean_reward").chance == pytest.approx(limit, rel=0.1)


def test_lengths_are_tested_by_the_spread_of_the_histogram() -> None:
    assert of(loop(response_tokens=0.8), "mean_length").biased
    assert not of(loop(response_tokens=0.95), "mean_length").biased
    unknown = estimate(make_loop(response_lengths=(), grown={"assembled_response_tokens": 10**6})).bias
    assert of(unknown, "mean_length").chance is None
    assert not of(unknown, "mean_length").biased


def test_rewards_beyond_one_are_not_tested() -> None:
    large = loop(reward_milli=3)
    assert of(large, "mean_reward").ratio == 3
    assert (of(large, "mean_reward").chance, of(large, "mean_reward").biased) == (None, False)


def test_few_groups_and_small_differences_prove_nothing() -> None:
    assert compared("x", 1.0, 0.5, 29, 0.1).chance is None
    assert compared("x", 1.0, 0.5, 30, 0.1).biased
    assert not compared("x", 1.0, 0.995, 10**9, 0.1).biased
    assert compared("x", 1.0, 0.98, 10**9, 0.1).biased
    assert compared("x", -0.5, 0.5, 100, 0.1).ratio is None


def test_shares_of_environments_are_compared_over_the_whole_run() -> None:
    def bias(math: int) -> Bias:
        trained = {"math": {"assembled_groups": math}, "code": {"assembled_groups": 400 - math}}
        sums = dict.fromkeys(
            (
                "staleness_sum",
                "pre_queue_staleness_sum",
                "in_queue_staleness_sum",
                "token_staleness_milli_sum",
                "assembled_response_tokens",
            ),
            0,
        )
        accepted = {name: {"trained": Amount(groups=300)} for name in trained}
        statistics = {name: {**sums, **counts} for name, counts in trained.items()}
        return estimate(make_loop(environments=accepted, environment_statistics=statistics)).bias

    few = of(bias(150), "math")
    assert (few.sampled, few.trained, few.ratio) == (0.5, 0.375, 0.75)
    assert few.biased
    # Three standard errors of 400 groups are 7.5 points.
    assert not of(bias(175), "math").biased
    assert estimate(make_loop(environments={"": {"trained": Amount(groups=5)}})).bias.environments == ()
