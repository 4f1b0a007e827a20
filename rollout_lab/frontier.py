"""Frontier of policies on the same engines: staleness, throughput and length bias, and who is beaten in all three."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollout_lab.comparison import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Means of a policy over several seeds, on the same engines as the others."""

    name: str
    staleness: float
    """Mean by the head, in versions."""
    throughput: float
    """Steps over those of the ideal period, B·L̄ / min(R, T)."""
    bias: float
    """Trained over sampled mean length, minus 1."""
    oldest: int
    """Largest staleness of any seed."""
    spread: tuple[float, float, float]
    """Standard deviations of staleness, throughput and bias over the seeds."""


INDISTINCT: Mapping[str, float] = {"staleness": 0.02, "throughput": 0.005, "bias": 0.005}
"""Differences that decide nothing: versions, shares; three standard deviations of 400 steps, or more."""


def point(trials: Sequence[Trial]) -> Point:
    """The policy whose trials, by seed, these are."""
    measures = [
        [trial.result.staleness for trial in trials],
        [1 / trial.result.train_period_ratio for trial in trials],
        [trial.result.length_bias for trial in trials],
    ]
    means = [statistics.mean(values) for values in measures]
    spread = tuple(statistics.stdev(values) if len(values) > 1 else 0.0 for values in measures)
    return Point(
        name=trials[0].name,
        staleness=means[0],
        throughput=means[1],
        bias=means[2],
        oldest=max(trial.result.staleness_max for trial in trials),
        spread=spread,  # type: ignore[arg-type]
    )


def beaten_by(point: Point, others: Sequence[Point]) -> list[Point]:
    """The points that are as good in staleness, throughput and bias, and better in one of them, the least stale first.

    A difference up to that of INDISTINCT is none.
    """
    return sorted((other for other in others if _beats(other, point)), key=lambda other: other.staleness)


def _beats(one: Point, other: Point) -> bool:
    gains = [
        (other.staleness - one.staleness) / INDISTINCT["staleness"],
        (one.throughput - other.throughput) / INDISTINCT["throughput"],
        (abs(other.bias) - abs(one.bias)) / INDISTINCT["bias"],
    ]
    return min(gains) >= -1 and max(gains) > 1
