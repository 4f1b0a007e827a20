"""Lengths: means, tails and caps by formula are those of what is drawn."""

import numpy as np
import pytest

from buffer_service.simulator.lengths import Empirical, Fixed, Lengths, Lognormal, token_tailness
from buffer_wire.errors import InvalidField


@pytest.mark.parametrize(
    "lengths",
    [
        Fixed(700),
        Lognormal.with_mean(1_400, 0.5),
        Lognormal.with_mean(1_400, 1.2, 8_192),
        Lognormal.with_mean(300, 0.05),
        Empirical.of([10, 20, 30, 1_000]),
        Empirical(tuple((n, 2 * n, 3 * n) for n in range(1, 50))),
    ],
    ids=repr,
)
@pytest.mark.parametrize("group_size", [1, 3, 8])
def test_moments_are_those_of_what_is_drawn(lengths: Lengths, group_size: int) -> None:
    drawn = lengths.draw(np.random.default_rng(7), 60_000, group_size)
    assert drawn.shape == (60_000, group_size)
    assert drawn.min() >= 1
    assert lengths.mean == pytest.approx(drawn.mean(), rel=0.015)
    assert lengths.variation == pytest.approx(drawn.std() / drawn.mean(), rel=0.03, abs=0.01)
    assert lengths.tailness(group_size) == pytest.approx(drawn.max(axis=1).mean() / drawn.mean(), rel=0.015)


def test_the_mean_is_the_one_asked_for_with_the_cap() -> None:
    capped = Lognormal.with_mean(1_000, 1.0, 2_000)
    assert capped.mean == pytest.approx(1_000, rel=1e-6)
    assert capped.draw(np.random.default_rng(0), 1_000, 8).max() == 2_000


def test_lengths_of_a_tailness_have_it() -> None:
    for tailness in (1.0, 1.42, 2.5):
        assert Lognormal.with_tailness(tailness, 8).tailness(8) == pytest.approx(tailness, rel=1e-4)


def test_recorded_groups_stay_together_when_they_have_the_size() -> None:
    recorded = Empirical(((1, 2), (100, 200)))
    drawn = recorded.draw(np.random.default_rng(0), 200, 2)
    assert {tuple(group) for group in drawn.tolist()} == {(1, 2), (100, 200)}
    assert len({tuple(group) for group in recorded.draw(np.random.default_rng(0), 200, 3).tolist()}) > 2


def test_tokens_see_longer_groups() -> None:
    lengths = Lognormal.with_mean(1_000, 0.8)
    assert token_tailness(Fixed(10), 8) == 1.0
    assert token_tailness(lengths, 8) > lengths.tailness(8)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Fixed(0),
        lambda: Lognormal.with_mean(0, 1),
        lambda: Lognormal.with_mean(100, 1, 90),
        lambda: Lognormal(1, -1),
        lambda: Lognormal.with_tailness(8, 8),
        lambda: Empirical(()),
        lambda: Empirical.of([3, 0]),
    ],
)
def test_lengths_that_cannot_be_are_refused(make: object) -> None:
    with pytest.raises(InvalidField):
        make()  # type: ignore[operator]
