"""The objectives once more in plain float64 python, gradients derived by hand, one token at a time."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TokenCase:
    """Inputs of an objective: float64, shapes equal; mask bool. Of [B, T] the rows are the samples."""

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
        return TokenCase(*(getattr(self, field.name).reshape(-1) for field in fields(self)))

    def rows(self, rows: slice | Sequence[int]) -> "TokenCase":
        return TokenCase(*(getattr(self, field.name)[rows] for field in fields(self)))

    def one_advantage_a_sample(self) -> "TokenCase":
        return replace(self, advantages=np.repeat(self.advantages[:, :1], self.advantages.shape[1], axis=1))

    def hidden_numbers_replaced(self, number: float) -> "TokenCase":
        """Make the same case with `number` wherever the mask is off."""
        shown = {field.name: np.where(self.mask, getattr(self, field.name), number) for field in fields(self)[:-1]}
        return replace(self, **shown)

    def tensors(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """Tensors by role; `logprobs` requires a gradient."""
        out = {
            name: torch.tensor(getattr(self, name), dtype=dtype)
            for name in ("logprobs", "old", "behaviour", "advantages")
        }
        out["mask"] = torch.tensor(self.mask)
        out["logprobs"].requires_grad_()
        return out

    def samples(self) -> "Iterator[list[Token]]":
        """The tokens of each row that count."""
        for row in range(len(self.mask)):
            yield [
                Token(*(float(getattr(self, field.name)[row, t]) for field in fields(self)[:-1]))
                for t in range(self.mask.shape[1])
                if self.mask[row, t]
            ]


@dataclass(frozen=True, slots=True)
class Token:
    """log π, log π_old, log μ and Â of one token."""

    new: float
    old: float
    behaviour: float
    advantage: float


Terms: TypeAlias = list[tuple[float, float]]
"""Terms for each token of a sample: its term of the objective J, and J's derivative by its log π, before any
denominator.
"""

SampleRule: TypeAlias = Callable[[list[Token]], Terms]
TokenRule: TypeAlias = Callable[[float, float, float, float], tuple[float, float]]
"""(log π, log π_old, log μ, Â) → (term of the objective J, its derivative by log π)."""

WeightRule: TypeAlias = Callable[[list[Token]], list[float]]
Mean: TypeAlias = Literal["loss_tokens", "total_samples"]


def of_tokens(rule: TokenRule) -> SampleRule:
    return lambda sample: [rule(t.new, t.old, t.behaviour, t.advantage) for t in sample]


def weighted(rule: SampleRule, weights: WeightRule) -> SampleRule:
    return lambda sample: [
        (w * term, w * slope) for w, (term, slope) in zip(weights(sample), rule(sample), strict=True)
    ]


def mean_loss_and_gradient(case: TokenCase, rule: SampleRule, mean: Mean, total: float) -> tuple[float, Array]:
    """The loss of [B, T], −Σ terms / total or −Σ (Σ of a sample / its tokens) / total, and its gradient by log π."""
    loss, gradient = 0.0, np.zeros(case.logprobs.shape)
    for row, sample in enumerate(case.samples()):
        scale = 1.0 / total if mean == "loss_tokens" else 1.0 / (total * max(len(sample), 1))
        for t, (term, slope) in zip(np.flatnonzero(case.mask[row]), rule(sample), strict=True):
            loss -= term * scale
            gradient[row, t] = -slope * scale
    return loss, gradient


def loss_and_gradient(case: TokenCase, rule: TokenRule, total: float | None = None) -> tuple[float, Array]:
    """−Σ terms / total over the mask, and its gradient by log π, by a loop over tokens of any shape."""
    flat = TokenCase(*(getattr(case, field.name).reshape(1, -1) for field in fields(case)))
    loss, gradient = mean_loss_and_gradient(flat, of_tokens(rule), "loss_tokens", total or float(case.mask.sum()))
    return loss, gradient.reshape(case.logprobs.shape)


# ── objectives ───────────────────────────────────────────────────────────────


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


def policy_gradient(new: float, _old: float, _behaviour: float, advantage: float) -> tuple[float, float]:
    return advantage * new, advantage


def ppo(low: float, high: float) -> TokenRule:
    def rule(new: float, old: float, _behaviour: float, advantage: float) -> tuple[float, float]:
        return clipped_surrogate(math.exp(new - old), advantage, low, high)

    return rule


def clipped_surrogate(ratio: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    unclipped = ratio * advantage
    clipped = min(max(ratio, 1.0 - low), 1.0 + high) * advantage
    return (unclipped, unclipped) if unclipped <= clipped else (clipped, 0.0)


def gspo(low: float, high: float) -> SampleRule:
    def rule(sample: list[Token]) -> Terms:
        if not sample:
            return []
        ratio = math.prod(math.exp(t.new - t.old) for t in sample) ** (1.0 / len(sample))
        return [clipped_surrogate(ratio, t.advantage, low, high) for t in sample]

    return rule


def cispo(low: float | None, high: float) -> TokenRule:
    def rule(new: float, old: float, _behaviour: float, advantage: float) -> tuple[float, float]:
        ratio = min(math.exp(new - old), 1.0 + high)
        ratio = ratio if low is None else max(ratio, 1.0 - low)
        return ratio * advantage * new, ratio * advantage

    return rule


def ipo(low: float, high: float, kl: float, *, by_sign: bool) -> TokenRule:
    def rule(new: float, _old: float, behaviour: float, advantage: float) -> tuple[float, float]:
        ratio, moved = math.exp(new - behaviour), math.exp(new) - math.exp(behaviour)
        out = moved > high or moved < -low
        if by_sign:
            out = moved > high if advantage > 0 else moved < -low
        gained = 0.0 if out else ratio * advantage
        # d/d log π of −τ (log π − log μ)² is −2 τ (log π − log μ).
        return gained - kl * (new - behaviour) ** 2, gained - 2 * kl * (new - behaviour)

    return rule


# ── weights ──────────────────────────────────────────────────────────────────


def ratios(sample: list[Token], train: Literal["new", "old"], level: str) -> list[float]:
    of_token = [math.exp(getattr(t, train) - t.behaviour) for t in sample]
    if level == "token" or not sample:
        return of_token
    product = math.prod(of_token)
    return [product if level == "sequence" else product ** (1.0 / len(sample))] * len(sample)


def truncated(cap: float, train: Literal["new", "old"] = "new", level: str = "token") -> WeightRule:
    return lambda sample: [min(ratio, cap) for ratio in ratios(sample, train, level)]


def masked(low: float, high: float, train: Literal["new", "old"] = "new", level: str = "token") -> WeightRule:
    return lambda sample: [ratio if low <= ratio <= high else 0.0 for ratio in ratios(sample, train, level)]


def trusted(delta: float) -> WeightRule:
    def rule(sample: list[Token]) -> list[float]:
        divergence = 0.0
        for t in sample:
            p, q = math.exp(t.behaviour), math.exp(t.new)
            divergence += p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
        return [float(divergence <= delta * len(sample))] * len(sample)

    return rule


# ── comparing ────────────────────────────────────────────────────────────────


def assert_same(loss: Tensor, logprobs: Tensor, expected: tuple[float, Any], rtol: float = 1e-12) -> None:
    """Value and gradient of `loss` by `logprobs` agree with the reference."""
    (gradient,) = torch.autograd.grad(loss, logprobs)
    np.testing.assert_allclose(loss.item(), expected[0], rtol=rtol, atol=1e-15)
    np.testing.assert_allclose(gradient.numpy(), expected[1], rtol=rtol, atol=1e-15)
