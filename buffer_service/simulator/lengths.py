"""Lengths of responses: distributions that can be drawn from in whole groups, and whose mean and tailness are known.

Invariant: lengths are whole numbers of at least 1 token, and what a generator with the same seed draws is the same.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from buffer_wire.errors import InvalidField

_Z_LOW, _Z_HIGH, _Z_POINTS = -9.0, 11.0, 2_001
_BISECTIONS = 80


class Lengths(Protocol):
    """A distribution of response lengths, in tokens."""

    @property
    def mean(self) -> float:
        """L̄."""

    @property
    def variation(self) -> float:
        """Coefficient of variation: standard deviation over mean."""

    def tailness(self, group_size: int) -> float:
        """M: mean of the longest of group_size responses, over L̄."""

    def draw(self, rng: np.random.Generator, groups: int, group_size: int) -> NDArray[np.int64]:
        """Lengths [groups, group_size] of so many groups."""


_TOKEN_TAILNESS_GROUPS = 20_000


def token_tailness(lengths: Lengths, group_size: int) -> float:
    """Mean longest response of a token's group over L̄, each group counted once per token; from a fixed sample."""
    drawn = lengths.draw(np.random.default_rng(0), _TOKEN_TAILNESS_GROUPS, group_size)
    tokens = drawn.sum(axis=1)
    return float((drawn.max(axis=1) * tokens).sum() / tokens.sum() / drawn.mean())


@dataclass(frozen=True, slots=True)
class Fixed:
    """Every response has the same length (tailness 0 of the page)."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise InvalidField("length_mean", self.tokens, "at least 1 token")

    @property
    def mean(self) -> float:
        """L̄."""
        return float(self.tokens)

    @property
    def variation(self) -> float:
        """None."""
        return 0.0

    def tailness(self, group_size: int) -> float:  # noqa: ARG002 (of the protocol)
        """1: the longest is as long as the others."""
        return 1.0

    def draw(self, rng: np.random.Generator, groups: int, group_size: int) -> NDArray[np.int64]:  # noqa: ARG002
        """Lengths [groups, group_size]."""
        return np.full((groups, group_size), self.tokens, dtype=np.int64)


def _bisected(low: float, high: float, is_below: Callable[[float], bool]) -> float:
    """The value between `low` and `high` up to which `is_below` holds."""
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True, slots=True)
class Lognormal:
    """exp(mu + sigma·z), z standard normal, at most `cap` tokens (0: no cap)."""

    mu: float
    sigma: float
    cap: int = 0

    def __post_init__(self) -> None:
        if self.sigma < 0 or not math.isfinite(self.sigma):
            raise InvalidField("length_sigma", self.sigma, "0 or more")
        if self.cap < 0:
            raise InvalidField("length_cap", self.cap, "0 for none, or tokens")

    @classmethod
    def with_mean(cls, mean: float, sigma: float, cap: int = 0) -> "Lognormal":
        """The one whose mean, cap included, is `mean` tokens. Raises InvalidField when the cap does not allow it."""
        if not mean >= 1:
            raise InvalidField("length_mean", mean, "at least 1 token")
        if cap == 0:
            return cls(math.log(mean) - sigma * sigma / 2, sigma)
        if cap <= mean:
            raise InvalidField("length_cap", cap, f"above the mean, {mean:g}")
        low, high = math.log(mean) - sigma * sigma / 2, math.log(cap) + 40 * (sigma + 1)
        return cls(_bisected(low, high, lambda mu: cls(mu, sigma, cap).mean < mean), sigma, cap)

    @classmethod
    def with_tailness(cls, tailness: float, group_size: int, mean: float = 1_000.0) -> "Lognormal":
        """The uncapped one in which the longest of group_size is `tailness` times the mean, on average."""
        most = float(group_size)
        if not 1 <= tailness < most and tailness != 1:
            raise InvalidField("tailness", tailness, f"1 to below the group size, {group_size}")
        sigma = _bisected(0.0, 6.0, lambda tried: cls.with_mean(mean, tried).tailness(group_size) < tailness)
        return cls.with_mean(mean, sigma)

    @property
    def mean(self) -> float:
        """L̄, cap included."""
        return self._moment(1)

    @property
    def variation(self) -> float:
        """Standard deviation over mean, cap included."""
        return math.sqrt(max(0.0, self._moment(2) / self._moment(1) ** 2 - 1))

    def tailness(self, group_size: int) -> float:
        """E[max]/L̄, by quadrature over G·φ(z)·Φ(z)^(G-1)."""
        z = np.linspace(_Z_LOW, _Z_HIGH + self.sigma, _Z_POINTS)
        below = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in z])
        density = group_size * np.exp(-z * z / 2) / math.sqrt(2 * math.pi) * below ** (group_size - 1)
        x = np.exp(self.mu + self.sigma * z)
        weighted = (np.minimum(x, self.cap) if self.cap else x) * density
        longest = float(weighted.sum() * (z[1] - z[0]))
        return longest / self.mean

    def draw(self, rng: np.random.Generator, groups: int, group_size: int) -> NDArray[np.int64]:
        """Lengths [groups, group_size]."""
        tokens = np.exp(self.mu + self.sigma * rng.standard_normal((groups, group_size)))
        if self.cap:
            tokens = np.minimum(tokens, self.cap)
        return np.maximum(1, np.rint(tokens)).astype(np.int64)

    def _moment(self, order: int) -> float:
        """E[min(L, cap)^order]."""
        whole = math.exp(order * self.mu + (order * self.sigma) ** 2 / 2)
        if not self.cap:
            return whole
        if self.sigma == 0:
            return min(whole, float(self.cap) ** order)
        at = (math.log(self.cap) - self.mu) / self.sigma
        beyond = 0.5 * math.erfc(at / math.sqrt(2))
        return whole * 0.5 * math.erfc((order * self.sigma - at) / math.sqrt(2)) + float(self.cap) ** order * beyond


@dataclass(frozen=True, slots=True)
class Empirical:
    """Lengths that were recorded, drawn again with replacement.

    Whole recorded groups are drawn when they have the size that is asked for, else single responses. So responses to
    one prompt stay as alike as they were.
    """

    groups: tuple[tuple[int, ...], ...]
    """Lengths by group; single responses are groups of one."""
    _all: NDArray[np.int64] = field(init=False, repr=False, compare=False)
    _size: int = field(init=False, repr=False, compare=False)
    """Size of every group; 0 when they differ."""

    def __post_init__(self) -> None:
        values = np.array([tokens for group in self.groups for tokens in group], dtype=np.int64)
        if not len(values) or values.min() < 1:
            raise InvalidField("lengths", "empty, or a length below 1", "at least one response of 1 token or more")
        sizes = {len(group) for group in self.groups}
        object.__setattr__(self, "_all", values)
        object.__setattr__(self, "_size", sizes.pop() if len(sizes) == 1 else 0)

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "Empirical":
        """Lengths of single responses."""
        return cls(tuple((int(tokens),) for tokens in lengths))

    @property
    def mean(self) -> float:
        """L̄."""
        return float(self._all.mean())

    @property
    def variation(self) -> float:
        """Standard deviation over mean."""
        return float(self._all.std() / self._all.mean())

    def tailness(self, group_size: int) -> float:
        """Mean longest over mean: of whole groups as they are, of single responses E[max] of group_size draws."""
        whole = self._whole(group_size)
        if whole is not None:
            return float(whole.max(axis=1).mean() / whole.mean())
        ordered = np.sort(self._all)
        at_most = np.arange(1, len(ordered) + 1) / len(ordered)
        chance = np.diff(at_most**group_size, prepend=0.0)
        return float((ordered * chance).sum() / self.mean)

    def draw(self, rng: np.random.Generator, groups: int, group_size: int) -> NDArray[np.int64]:
        """Lengths [groups, group_size]."""
        whole = self._whole(group_size)
        if whole is not None:
            return whole[rng.integers(len(whole), size=groups)]
        return self._all[rng.integers(len(self._all), size=(groups, group_size))]

    def _whole(self, group_size: int) -> NDArray[np.int64] | None:
        return self._all.reshape(-1, group_size) if self._size == group_size > 1 else None
