"""Means over seeds, and how sure they are: by steps, and by the wall clock up to the time that every cell reached.

An interval holds the mean with 95 %. The spread over seeds is pooled over the policies of a loss, which gives it more
degrees of freedom than a policy's few seeds: it is taken to be the same in all. Differences to the synchronous run are
taken seed by seed, since seeds differ in the model that they start from.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from bench.reward.cells import SYNCHRONOUS, Row

Values: TypeAlias = npt.NDArray[np.float64]
_LEAST_DEGREES = 3
"""Least degrees of freedom with which an interval says something."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Curve of a policy: mean over its seeds, and half the width of the interval, NaN where the spread is not known."""

    mean: Values
    half: Values
    seeds: int


def shared_s(rows: Sequence[Row]) -> float:
    """The time that every cell reached, in seconds."""
    return min((float(row["at_s"][-1]) for row in rows), default=0.0)


def by_step(row: Row, steps: Values) -> Values:
    """Expected reward after so many steps."""
    found: Values = _rewards(row)[steps.astype(int)]
    return found


def by_time(row: Row, seconds: Values) -> Values:
    """Expected reward after so many seconds: that of the last weights that were published by then."""
    return _rewards(row)[np.searchsorted(row["at_s"], seconds, side="right") - 1]


def _rewards(row: Row) -> Values:
    return np.asarray(row["reward"], np.float64)


def curves(values: Mapping[str, Mapping[int, Values]]) -> dict[str, Curve]:
    """Curves of the policies of a loss, from the values of their seeds."""
    squares: Values | float = 0.0
    degrees = 0
    for seeds in values.values():
        stacked = np.stack(list(seeds.values()))
        squares = squares + ((stacked - stacked.mean(axis=0)) ** 2).sum(axis=0)
        degrees += len(seeds) - 1
    spread = np.sqrt(squares / degrees) if degrees >= _LEAST_DEGREES else np.asarray(math.nan)
    found = {}
    for policy, seeds in values.items():
        mean = np.stack(list(seeds.values())).mean(axis=0)
        half = np.broadcast_to(t_quantile(degrees) * spread / math.sqrt(len(seeds)), mean.shape)
        found[policy] = Curve(mean, half, len(seeds))
    return found


def against_synchronous(values: Mapping[str, Mapping[int, Values]]) -> dict[str, dict[int, Values]]:
    """Differences to the synchronous run of the same seed, of the policies and seeds that have one."""
    base = values.get(SYNCHRONOUS, {})
    found = {
        policy: {seed: one - base[seed] for seed, one in seeds.items() if seed in base}
        for policy, seeds in values.items()
        if policy != SYNCHRONOUS
    }
    return {policy: seeds for policy, seeds in found.items() if seeds}


def t_quantile(degrees: int) -> float:
    """97.5 % quantile of Student's t by its expansion around the normal one; within 1 % from 3 degrees of freedom on.

    NaN below. Abramowitz and Stegun, 26.7.5.
    """
    if degrees < _LEAST_DEGREES:
        return math.nan
    z, n = 1.959964, degrees
    terms = (
        z,
        (z**3 + z) / (4 * n),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3),
    )
    return sum(terms)


def settled(rows: Sequence[Row], name: str) -> float:
    """Mean of a figure of each step over the second half of the steps: by then staleness is as it stays."""
    return fmean(fmean(row[name][len(row[name]) // 2 :]) for row in rows)
