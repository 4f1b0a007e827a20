"""Diagnostics of the policy in training against the one that generated: figures for logs, without gradients.

With ρ_t = π(y_t) / μ(y_t) over the n tokens that count, all computed in float64:

    ratio_mean   Σρ / n          expected 1 where the tokens really came from μ
    ratio_min, ratio_max         the extremes of ρ
    effective_sample_size        (Σρ)² / Σρ², in tokens: Kish, "Survey Sampling" (1965)
    kl_behaviour Σ(ρ − 1 − log ρ) / n: Schulman's k3 estimate of KL(μ ‖ π) from samples of μ
                 ("Approximating KL Divergence", 2020); never negative

Invariant: `RatioSums` of the parts of a batch, added in any order, give the figures of the whole, so micro-batches,
micro-batches and ranks are merged exactly. `clip_fraction` adds up as losses do.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from buffer_wire.errors import InvalidField
from trainer_client.objectives.denominators import Total, mean_loss
from trainer_client.objectives.samples import RatioLevel, log_ratio_at
from trainer_client.objectives.tokens import (
    check_bounds,
    log_bound,
    log_ratios,
    token_advantages,
    token_staleness,
)

STALENESS_BUCKETS = (0, 1, 2, 3, 4, 8)
"""Lower bounds of the staleness buckets, in versions; the last bucket is open."""


@dataclass(frozen=True, slots=True)
class RatioDiagnostics:
    """Figures of the module's docstring over `tokens` tokens; all zero where there are none."""

    tokens: int
    ratio_mean: float
    ratio_min: float
    ratio_max: float
    effective_sample_size: float
    """Effective sample size in tokens, between 1 and `tokens`."""
    kl_behaviour: float
    """KL estimate in nats per token."""

    @property
    def effective_fraction(self) -> float:
        """Effective sample size as a share of the tokens, 0 to 1."""
        return self.effective_sample_size / self.tokens if self.tokens else 0.0


@dataclass(frozen=True, slots=True)
class RatioSums:
    """Sums from which the figures are computed, to be added up: `sum(parts, RatioSums()).summary()`.

    Plain numbers, to be gathered from ranks as an object. Sums of ratios are kept as logarithms: the square of a ratio
    that one bad token drives to e^400 would be infinite.
    """

    tokens: int = 0
    log_ratio_sum: float = -math.inf
    """Logarithm of the sum of ratios, log Σρ."""
    log_square_sum: float = -math.inf
    """Logarithm of the sum of squared ratios, log Σρ²."""
    log_ratio_min: float = math.inf
    log_ratio_max: float = -math.inf
    kl_sum: float = 0.0
    """Sum Σ(ρ − 1 − log ρ), in nats."""

    @classmethod
    def of(cls, log_ratio: Tensor) -> Self:
        """Compute the sums over log ρ, float64 [n]."""
        if log_ratio.numel() == 0:
            return cls()
        figures = (
            log_ratio.logsumexp(0),
            (2 * log_ratio).logsumexp(0),
            log_ratio.min(),
            log_ratio.max(),
            # expm1 keeps the digits that ρ − 1 loses near ρ = 1.
            (torch.expm1(log_ratio) - log_ratio).sum(),
        )
        return cls(log_ratio.numel(), *torch.stack(figures).tolist())

    def __add__(self, other: "RatioSums") -> "RatioSums":
        return RatioSums(
            self.tokens + other.tokens,
            _log_add(self.log_ratio_sum, other.log_ratio_sum),
            _log_add(self.log_square_sum, other.log_square_sum),
            min(self.log_ratio_min, other.log_ratio_min),
            max(self.log_ratio_max, other.log_ratio_max),
            self.kl_sum + other.kl_sum,
        )

    def summary(self) -> RatioDiagnostics:
        """Compute the figures from the sums."""
        if self.tokens == 0:
            return RatioDiagnostics(0, 0.0, 0.0, 0.0, 0.0, 0.0)
        nothing_left = self.log_ratio_sum == -math.inf
        return RatioDiagnostics(
            tokens=self.tokens,
            ratio_mean=_exp(self.log_ratio_sum - math.log(self.tokens)),
            ratio_min=_exp(self.log_ratio_min),
            ratio_max=_exp(self.log_ratio_max),
            effective_sample_size=0.0 if nothing_left else _exp(2 * self.log_ratio_sum - self.log_square_sum),
            kl_behaviour=self.kl_sum / self.tokens,
        )


def ratio_sums(logprobs: Tensor, behaviour_logprobs: Tensor, loss_mask: Tensor) -> RatioSums:
    """Compute the sums over all tokens of the mask.

    `logprobs`: float32 or float64 [B, T] or [ΣT]. `behaviour_logprobs`: floating, same shape. `loss_mask`: bool or
    integer, same shape. Raises `InvalidField` for other shapes and dtypes.
    """
    log_ratio, mask = log_ratios(
        logprobs.detach(), behaviour_logprobs, loss_mask, "behaviour_logprobs", dtype=torch.float64
    )
    return RatioSums.of(log_ratio[mask])


def ratio_sums_by_staleness(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    loss_mask: Tensor,
    staleness: Tensor,
    *,
    lower_bounds: Sequence[int] = STALENESS_BUCKETS,
) -> dict[str, RatioSums]:
    """Compute the sums of each staleness bucket that has tokens, youngest first.

    `staleness`: integer, in weight versions, the shape of `logprobs` (per token: `batch.train_version -
    batch.versions`), or [B] beside [B, T] (per sample). `lower_bounds`: ascending from 0; bucket i spans [bound i,
    bound i + 1), the last one is open. Keys read "0", "4-7", "8+".

    Raises `InvalidField` for other shapes and dtypes, for negative staleness and for bounds out of order.
    """
    log_ratio, mask = log_ratios(
        logprobs.detach(), behaviour_logprobs, loss_mask, "behaviour_logprobs", dtype=torch.float64
    )
    bounds = list(lower_bounds)
    if not bounds or bounds[0] != 0 or bounds != sorted(set(bounds)):
        raise InvalidField("lower_bounds", bounds, "ascending integers from 0")
    ages = token_staleness(staleness, logprobs)[mask]
    if bool((ages < 0).any()):
        raise InvalidField("staleness", int(ages.min()), "0 or more: no token comes from a later version")
    bucket = torch.bucketize(ages, torch.tensor(bounds, device=ages.device), right=True) - 1
    counted = log_ratio[mask]
    return {
        _label(bounds, i): RatioSums.of(counted[bucket == i]) for i in range(len(bounds)) if bool((bucket == i).any())
    }


def merged_by_staleness(parts: Iterable[Mapping[str, RatioSums]]) -> dict[str, RatioSums]:
    """Add results of `ratio_sums_by_staleness` with equal bounds, bucket by bucket, youngest first."""
    total: dict[str, RatioSums] = {}
    for part in parts:
        for label, sums in part.items():
            total[label] = total.get(label, RatioSums()) + sums
    return dict(sorted(total.items(), key=lambda item: int(item[0].rstrip("+").split("-")[0])))


def ratio_diagnostics(logprobs: Tensor, behaviour_logprobs: Tensor, loss_mask: Tensor) -> RatioDiagnostics:
    """Compute `ratio_sums(...).summary()`, for one call that sees the whole batch."""
    return ratio_sums(logprobs, behaviour_logprobs, loss_mask).summary()


def ratio_diagnostics_by_staleness(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    loss_mask: Tensor,
    staleness: Tensor,
    *,
    lower_bounds: Sequence[int] = STALENESS_BUCKETS,
) -> dict[str, RatioDiagnostics]:
    """Compute the summaries of `ratio_sums_by_staleness(...)`, for one call that sees the whole batch."""
    sums = ratio_sums_by_staleness(logprobs, behaviour_logprobs, loss_mask, staleness, lower_bounds=lower_bounds)
    return {label: bucket.summary() for label, bucket in sums.items()}


def clip_fraction(  # noqa: PLR0913  # the ratio, its bounds and the denominator
    logprobs: Tensor,
    reference_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    low: float = 0.0,
    high: float = math.inf,
    advantages: Tensor | None = None,
    level: RatioLevel = "token",
    token_counts: Tensor | None = None,
    loss_tokens: Total | None = None,
) -> float:
    """Compute the share of loss tokens whose ratio π / π_reference lies outside [`low`, `high`]; 0 to 1.

    With `advantages` (shapes of the losses) only the bound that cuts the gradient counts: above `high` where Â > 0,
    below `low` where Â < 0. With `loss_tokens`, the total of the whole batch, the shares of its parts add up.

        AIPO             logprobs, behaviour        high=delta
        TIS, MIS         as their weights           high=cap; low=low, high=high; level and token_counts as there
        PPO              logprobs, old              low=1 − clip_low, high=1 + clip_high, advantages
        GSPO             logprobs, old              the same, level="geometric"
        CISPO            logprobs, old              high=1 + clip_high, and low=1 − clip_low where there is one

    Raises `InvalidField`, naming the argument.
    """
    check_bounds(low, high)
    log_ratio, mask = log_ratios(
        logprobs.detach(), reference_logprobs, loss_mask, "reference_logprobs", dtype=torch.float64
    )
    log_ratio = log_ratio_at(level, log_ratio, mask, token_counts)
    above, below = log_ratio > log_bound(high), log_ratio < log_bound(low)
    if advantages is not None:
        advantage = token_advantages(advantages, logprobs)
        above, below = above & (advantage > 0), below & (advantage < 0)
    clipped = (above | below).double()
    return float(mean_loss(clipped, mask, loss_tokens=loss_tokens, total_samples=None, token_counts=None))


def _exp(x: float) -> float:
    """Compute e^x, infinite where it does not fit a float64."""
    return math.exp(x) if x < 709.0 else math.inf


def _log_add(a: float, b: float) -> float:
    """Compute log(e^a + e^b)."""
    high = max(a, b)
    return high if math.isinf(high) else high + math.log1p(math.exp(min(a, b) - high))


def _label(bounds: Sequence[int], i: int) -> str:
    if i + 1 == len(bounds):
        return f"{bounds[i]}+"
    last = bounds[i + 1] - 1
    return str(bounds[i]) if last == bounds[i] else f"{bounds[i]}-{last}"
