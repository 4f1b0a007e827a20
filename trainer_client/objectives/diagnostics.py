"""How far the policy in training has moved from the one that generated: figures for logs, without gradients.

With ρ_t = π(y_t) / μ(y_t) over the n tokens that count, all computed in float64:

    ratio_mean   Σρ / n          expected 1 where the tokens really came from μ
    ratio_max    max ρ
    effective_sample_size        (Σρ)² / Σρ², in tokens: Kish, "Survey Sampling" (1965)
    kl_behaviour Σ(ρ − 1 − log ρ) / n: Schulman's k3 estimate of KL(μ ‖ π) from samples of μ
                 ("Approximating KL Divergence", 2020); never negative
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from buffer_wire.errors import InvalidField
from trainer_client.objectives.tokens import (
    check_logprobs,
    check_same_tokens,
    masked_log_ratio,
    token_mask,
)


@dataclass(frozen=True, slots=True)
class RatioDiagnostics:
    """Figures of the module's docstring over `tokens` tokens; all zero where there are none."""

    tokens: int
    ratio_mean: float
    ratio_max: float
    effective_sample_size: float
    """In tokens, between 1 and `tokens`."""
    kl_behaviour: float
    """In nats a token."""

    @property
    def effective_fraction(self) -> float:
        """Effective sample size as a share of the tokens, 0 to 1."""
        return self.effective_sample_size / self.tokens if self.tokens else 0.0


def ratio_diagnostics(logprobs: Tensor, behaviour_logprobs: Tensor, loss_mask: Tensor) -> RatioDiagnostics:
    """Diagnostics over all tokens of the mask.

    `logprobs`: float32 or float64 [B, T] or [ΣT]. `behaviour_logprobs`: floating, same shape. `loss_mask`:
    bool or integer, same shape. Raises `InvalidField` for other shapes and dtypes.
    """
    log_ratio, mask = _log_ratio(logprobs, behaviour_logprobs, loss_mask)
    return _summarise(log_ratio[mask])


def ratio_diagnostics_by_staleness(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    loss_mask: Tensor,
    staleness: Tensor,
    *,
    lower_bounds: Sequence[int] = (0, 1, 2, 3, 4, 8),
) -> dict[str, RatioDiagnostics]:
    """Diagnostics of each bucket of staleness that has tokens, youngest first.

    `staleness`: integer, in weight versions, the shape of `logprobs` (per token), or [B] beside [B, T] (per
    sample). `lower_bounds`: ascending from 0; bucket i spans [bound i, bound i + 1), the last one is open.
    Keys read "0", "4-7", "8+".

    Raises `InvalidField` for other shapes and dtypes, for negative staleness and for bounds out of order.
    """
    log_ratio, mask = _log_ratio(logprobs, behaviour_logprobs, loss_mask)
    bounds = list(lower_bounds)
    if not bounds or bounds[0] != 0 or bounds != sorted(set(bounds)):
        raise InvalidField("lower_bounds", bounds, "ascending integers from 0")
    ages = _per_token(staleness, logprobs)[mask]
    if bool((ages < 0).any()):
        raise InvalidField("staleness", int(ages.min()), "0 or more: no token comes from a later version")
    bucket = torch.bucketize(ages, torch.tensor(bounds, device=ages.device), right=True) - 1
    counted = log_ratio[mask]
    return {
        _label(bounds, i): _summarise(counted[bucket == i]) for i in range(len(bounds)) if bool((bucket == i).any())
    }


def _log_ratio(logprobs: Tensor, behaviour_logprobs: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    check_logprobs("logprobs", logprobs)
    check_same_tokens("behaviour_logprobs", behaviour_logprobs, logprobs)
    mask = token_mask(loss_mask, logprobs)
    return masked_log_ratio(logprobs.detach().double(), behaviour_logprobs.detach(), mask), mask


def _per_token(staleness: Tensor, logprobs: Tensor) -> Tensor:
    if staleness.dtype.is_floating_point or staleness.dtype == torch.bool:
        raise InvalidField("staleness.dtype", staleness.dtype, "an integer dtype")
    if staleness.shape == logprobs.shape:
        return staleness
    if logprobs.ndim == 2 and staleness.shape == logprobs.shape[:1]:
        return staleness.unsqueeze(1).expand(logprobs.shape)
    raise InvalidField(
        "staleness.shape",
        list(staleness.shape),
        f"{list(logprobs.shape)}, or [B] where logprobs is [B, T]",
    )


def _summarise(log_ratio: Tensor) -> RatioDiagnostics:
    """Diagnostics of log ρ, float64 [n]."""
    n = log_ratio.numel()
    if n == 0:
        return RatioDiagnostics(0, 0.0, 0.0, 0.0, 0.0)
    ratio = log_ratio.exp()
    # Scaled by the largest ratio, squares stay in range.
    scaled = (log_ratio - log_ratio.max()).exp()
    return RatioDiagnostics(
        tokens=n,
        ratio_mean=float(ratio.mean()),
        ratio_max=float(ratio.max()),
        effective_sample_size=float(scaled.sum().square() / scaled.square().sum()),
        # expm1 keeps the digits that ρ − 1 loses near ρ = 1.
        kl_behaviour=float((torch.expm1(log_ratio) - log_ratio).mean()),
    )


def _label(bounds: Sequence[int], i: int) -> str:
    if i + 1 == len(bounds):
        return f"{bounds[i]}+"
    last = bounds[i + 1] - 1
    return str(bounds[i]) if last == bounds[i] else f"{bounds[i]}-{last}"
