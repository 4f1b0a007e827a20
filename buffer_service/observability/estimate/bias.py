"""Bias between what is sampled and what is trained: means of assembled groups beside those of accepted ones.

The test. Suppose that what is trained were picked from what is sampled without regard to a quantity. Its mean over n
groups would then lie within 3 standard errors of the sampled mean in 99.7 of 100 cases.

A group counts as one observation, because responses to one prompt are alike. So the standard error is taken to be s/√n
with s of a single sample. That is too large where responses are not alike, and also where nearly everything that is
sampled is trained.

s is, with m and p the means of both sides:

- of a share p: √(p(1 - p));
- of lengths: from the histogram of the whole run, and as much of the mean for the longest;
- of turns: that of a geometric distribution, √(m(m - 1));
- of rewards: the most that values from -1 to 1 can have, √(1 - m²); others are not tested.

Below MIN_GROUPS nothing is tested, and a difference below LEAST of the sampled mean counts as no bias.

Bias that cannot be seen here: groups that never were accepted (failed tasks, cancelled leases), as they are in neither
mean; differences that cancel out in a mean; small biases, by the caution above. A drift of lengths or rewards during
training looks like a bias where it is fast, since what is trained was sampled a staleness earlier.
"""

from collections.abc import Iterator, Sequence
from math import sqrt

from buffer_service.domain.ops import Amount, RunView
from buffer_service.domain.window import Window
from buffer_wire.estimate import Bias, Comparison

MIN_GROUPS = 30
"""Trained groups from which a mean is about normal."""
ERRORS = 3.0
"""Standard errors that are left to chance."""
LEAST = 0.01


def bias(view: RunView) -> Bias:
    """Comparisons of what the window has; empty before it has trained groups."""
    environments = tuple(_environments(view))
    window = view.window
    counted = [f"{stage}_{unit}" for stage in ("accepted", "assembled") for unit in ("groups", "samples")]
    if window is None or not all(window.grown(name) for name in counted):
        return Bias(environments=environments)
    return Bias(
        sampled_groups=window.grown("accepted_groups"),
        trained_groups=window.grown("assembled_groups"),
        comparisons=tuple(_of_samples(window, _variation(view.response_lengths))),
        environments=environments,
    )


def _of_samples(window: Window, variation: float | None) -> Iterator[Comparison]:
    groups = window.grown("assembled_groups")

    def means(total: str, unit: str, scale: float = 1.0) -> tuple[float, float]:
        sampled, trained = (
            window.grown(f"{stage}_{total}") / window.grown(f"{stage}_{unit}") / scale
            for stage in ("accepted", "assembled")
        )
        return sampled, trained

    length, trained_length = means("response_tokens", "samples")
    longest, trained_longest = means("longest_tokens", "groups")
    reward, trained_reward = means("reward_milli", "samples", 1000)
    turns, trained_turns = means("turns", "samples")
    truncated, trained_truncated = means("truncated_samples", "samples")
    known = variation is not None
    yield compared("mean_length", length, trained_length, groups, length * (variation or 0) if known else None)
    yield compared("mean_longest", longest, trained_longest, groups, longest * (variation or 0) if known else None)
    spread = sqrt(1 - _between(reward, trained_reward) ** 2) if max(abs(reward), abs(trained_reward)) <= 1 else None
    per_sample, share = _between(turns, trained_turns), _between(truncated, trained_truncated)
    yield compared("mean_reward", reward, trained_reward, groups, spread)
    yield compared("mean_turns", turns, trained_turns, groups, sqrt(max(0.0, per_sample * (per_sample - 1))))
    yield compared("truncated_share", truncated, trained_truncated, groups, sqrt(share * (1 - share)))


def _between(one: float, other: float) -> float:
    return (one + other) / 2


def _environments(view: RunView) -> Iterator[Comparison]:
    trained = {name: sums["assembled_groups"] for name, sums in view.environment_statistics.items()}
    sampled = {name: ledger.get("accepted", Amount()).groups for name, ledger in view.environments.items()}
    all_trained, all_sampled = sum(trained.values()), sum(sampled.values())
    if len(sampled) < 2 or not (all_trained and all_sampled):
        return
    for name in sorted(sampled):
        share, its = sampled[name] / all_sampled, trained.get(name, 0) / all_trained
        either = _between(share, its)
        yield compared(name, share, its, all_trained, sqrt(either * (1 - either)))


def compared(name: str, sampled: float, trained: float, groups: int, deviation: float | None) -> Comparison:
    """Two means and whether so many trained groups leave their difference to chance; deviation None: not tested."""
    chance = ERRORS * deviation / sqrt(groups) if deviation is not None and groups >= MIN_GROUPS else None
    difference = abs(trained - sampled)
    return Comparison(
        name=name,
        sampled=sampled,
        trained=trained,
        ratio=trained / sampled if sampled > 0 else None,
        chance=chance,
        biased=chance is not None and difference > chance and difference > LEAST * abs(sampled),
    )


def _variation(counts: Sequence[int]) -> float | None:
    """Standard deviation over mean of the lengths; each taken for the middle of its bucket."""
    samples = sum(counts)
    if not samples:
        return None
    # Bucket i lies between 2**(i-1) and 2**i.
    middles = [1.0 if i == 0 else 0.75 * 2**i for i in range(len(counts))]
    mean = sum(count * middle for count, middle in zip(counts, middles, strict=True)) / samples
    square = sum(count * middle**2 for count, middle in zip(counts, middles, strict=True)) / samples
    # Fixed lengths lie in one bucket, whose width is all that is known of them.
    within = sum(count * (middle / 3) ** 2 / 3 for count, middle in zip(counts[1:], middles[1:], strict=True)) / samples
    return sqrt(max(0.0, square - mean**2) + within) / mean
