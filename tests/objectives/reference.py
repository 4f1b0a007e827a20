"""The objectives once more in plain float64 numpy, gradients derived by hand, one token at a time."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TokenCase:
    """Inputs of an objective: float64, shapes equal; mask bool."""

    logprobs: Array
    old: Array
    behaviour: Array
    advantages: Array
    mask: npt.NDArray[np.bool_]

    @classmethod
    def random(cls, rng: np.random.Generator, shape: tuple[int, ...]) -> "TokenCase":
        """Log ratios with standard deviation 1.5, so that clips at 0.8, 1.2, 2 and 4 all bind somewhere."""
        logprobs = -rng.exponential(2.0, shape)
        old = logprobs + rng.normal(0.0, 0.4, shape)
        behaviour = logprobs + rng.normal(0.0, 1.5, shape)
        return cls(logprobs, old, behaviour, rng.normal(0.0, 1.0, shape), rng.random(shape) < 0.7)

    def packed(self) -> "TokenCase":
        return TokenCase(*(getattr(self, name).reshape(-1) for name in self.__slots__))

    def rows(self, rows: slice) -> "TokenCase":
        return TokenCase(*(getattr(self, name)[rows] for name in self.__slots__))

    def tensors(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """Tensors by role; `logprobs` requires a gradient."""
        out = {name: torch.tensor(getattr(self, name), dtype=dtype) for name in ("logprobs", "old", "behaviour")}
        out["advantages"] = torch.tensor(self.advantages, dtype=dtype)
        out["mask"] = torch.tensor(self.mask)
        out["logprobs"].requires_grad_()
        return out


TokenRule = Callable[[float, float, float, float], tuple[float, float]]
"""(log π, log π_old, log μ, Â) → (term of the objective J, its derivative by log π)."""


def loss_and_gradient(case: TokenCase, rule: TokenRule, total: float | None = None) -> tuple[float, Array]:
    """−Σ terms / total over the mask, and its gradient by log π, by a loop over tokens."""
    denominator = float(case.mask.sum()) if total is None else total
    loss, gradient = 0.0, np.zeros(case.logprobs.shape)
    for index in np.ndindex(case.logprobs.shape):
        if case.mask[index]:
            term, slope = rule(*(float(x[index]) for x in (case.logprobs, case.old, case.behaviour, case.advantages)))
            loss -= term / denominator
            gradient[index] = -slope / denominator
    return loss, gradient


def aipo_detached(delta: float) -> TokenRule:
    def rule(new: float, _old: float, behaviour: float, advantage: float) -> tuple[float, float]:
        clipped = min(math.exp(new - behaviour), delta)
        return clipped * advantage, clipped * advantage

    return rule


def aipo_differentiated(delta: float) -> TokenRule:
    def rule(new: float, _old: float, behaviour: float, advantage: float) -> tuple[float, float]:
        ratio = math.exp(new - behaviour)
        # d/d log π of exp(log π − log μ)·Â is ratio·Â; of the constant δ·Â it is 0.
        return (delta * advantage, 0.0) if ratio > delta else (ratio * advantage, ratio * advantage)

    return rule


def tis_policy_gradient(cap: float) -> TokenRule:
    def rule(new: float, _old: float, behaviour: float, advantage: float) -> tuple[float, float]:
        weight = min(math.exp(new - behaviour), cap)
        return weight * advantage * new, weight * advantage

    return rule


def tis_ppo(cap: float, low: float, high: float) -> TokenRule:
    def rule(new: float, old: float, behaviour: float, advantage: float) -> tuple[float, float]:
        weight = min(math.exp(old - behaviour), cap)
        ratio = math.exp(new - old)
        unclipped = ratio * advantage
        clipped = min(max(ratio, 1.0 - low), 1.0 + high) * advantage
        if unclipped <= clipped:
            return weight * unclipped, weight * unclipped
        return weight * clipped, 0.0

    return rule


def assert_same(loss: Tensor, logprobs: Tensor, expected: tuple[float, Any], rtol: float = 1e-12) -> None:
    """Value and gradient of `loss` by `logprobs` agree with the reference."""
    (gradient,) = torch.autograd.grad(loss, logprobs)
    np.testing.assert_allclose(loss.item(), expected[0], rtol=rtol, atol=1e-15)
    np.testing.assert_allclose(gradient.numpy(), expected[1], rtol=rtol, atol=1e-15)
