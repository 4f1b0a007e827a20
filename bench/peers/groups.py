"""Groups that every side moves, as a worker has them: arrays of each sample.

Sizes are of the arrays: 9 bytes a token (int32 id, float32 log-probability, uint8 mask).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

TEMPLATES = 8
"""Groups of different contents; group `uid` has that of template uid % TEMPLATES."""


PROMPT = 16
"""Tokens that every sample begins with and that are not trained on; others after them may not be either."""


@dataclass(frozen=True, slots=True)
class Size:
    """One size of groups."""

    name: str
    samples: int
    tokens: int
    """Tokens of one sample."""

    @property
    def group_bytes(self) -> int:
        """Bytes of a group's arrays, rewards not counted."""
        return self.samples * self.tokens * 9


SIZES = (Size("18 KB", 8, 250), Size("147 KB", 8, 2_048), Size("1.2 MB", 16, 8_192))
DURABLE = Size("1.25 MiB", 16, 9_103)


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample: arrays [T] and its reward."""

    tokens: Array
    logprobs: Array
    mask: Array
    reward: float


@dataclass(frozen=True, slots=True)
class Columns:
    """A group with its samples laid end to end: arrays [all tokens], rewards [samples]. Any shape of as many values."""

    uid: int
    tokens: Array
    logprobs: Array
    mask: Array
    rewards: Array

    def read(self) -> None:
        """Read every value, so that no side leaves work undone."""
        for array in (self.tokens, self.logprobs, self.mask, self.rewards):
            array.max()

    def check(self, size: Size) -> None:
        """Raises ValueError where anything differs from what was pushed."""
        want = joined(self.uid, template(size, self.uid))
        for name in ("tokens", "logprobs", "mask", "rewards"):
            came, pushed = getattr(self, name).reshape(-1), getattr(want, name)
            if came.dtype != pushed.dtype or not np.array_equal(came, pushed):
                raise ValueError(f"group {self.uid} came with other {name}")


@cache
def _templates(size: Size) -> Sequence[Sequence[Sample]]:
    return [[_sample(size, np.random.default_rng([at, i])) for i in range(size.samples)] for at in range(TEMPLATES)]


def _sample(size: Size, rng: np.random.Generator) -> Sample:
    length = size.tokens
    mask = (np.arange(length) >= rng.integers(PROMPT, length // 4)).astype(np.uint8)
    ids = rng.integers(0, 151_936, length, np.int32)
    return Sample(ids, (-rng.exponential(0.6, length)).astype(np.float32), mask, float(np.float32(rng.random())))


def template(size: Size, uid: int) -> Sequence[Sample]:
    """The samples of group `uid`."""
    return _templates(size)[uid % TEMPLATES]


def joined(uid: int, samples: Sequence[Sample]) -> Columns:
    """The samples laid end to end."""
    return Columns(
        uid,
        np.concatenate([sample.tokens for sample in samples]),
        np.concatenate([sample.logprobs for sample in samples]),
        np.concatenate([sample.mask for sample in samples]),
        np.array([sample.reward for sample in samples], np.float32),
    )
