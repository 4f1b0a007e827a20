"""CISPO: the policy gradient with a clipped, detached importance ratio.

    J(θ) = Σ_t sg[clip(r_t, 1 − clip_low, 1 + clip_high)] · Â_t · log π_θ(y_t)        r_t = π_θ / π_old

divided as `denominators` says; the loss is −J. Where PPO drops the gradient of clipped tokens, here every token keeps
one. Source: MiniMax-M1 (arXiv:2506.13585), equations 4 and 5. There only the upper bound is tuned and the lower one is
off, as here by default; of the frameworks, Trinity-RFT starts at `clip_high` 0.28.

Without lower bound it is `policy_gradient_loss` with `tis_weights(logprobs, old_logprobs, cap=1 + clip_high)`; AIPO's
`ratio_detached` has the same gradient and another value.
"""

import math

import torch
from torch import Tensor

from trainer_client.objectives.denominators import Total
from trainer_client.objectives.policy_gradient import policy_gradient_loss
from trainer_client.objectives.tokens import (
    check_clip,
    log_ratios,
    token_weights,
)


def cispo_loss(  # noqa: PLR0913  # each is a quantity of the formula
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_high: float,
    clip_low: float | None = None,
    weights: Tensor | None = None,
    loss_tokens: Total | None = None,
    total_samples: Total | None = None,
    token_counts: Tensor | None = None,
    sample_tokens: Tensor | None = None,
) -> Tensor:
    """Compute the CISPO loss, −J of the module's docstring, as `policy_gradient_loss` in shapes, dtypes and errors.

    `old_logprobs`: of the policy that generated, or, with `weights` from it to that one, the trainer's own before the
    first optimizer step on the batch. `clip_high` > 0; 0 < `clip_low` < 1, or None for no lower bound.
    """
    check_clip(clip_low, clip_high)
    log_ratio, mask = log_ratios(logprobs.detach(), old_logprobs, loss_mask, "old_logprobs")
    lowest = -math.inf if clip_low is None else math.log1p(-clip_low)
    ratio = torch.where(mask, log_ratio.clamp(lowest, math.log1p(clip_high)).exp(), 0.0)
    return policy_gradient_loss(
        logprobs,
        advantages,
        loss_mask,
        weights=ratio * token_weights(weights, logprobs, mask),
        loss_tokens=loss_tokens,
        total_samples=total_samples,
        token_counts=token_counts,
        sample_tokens=sample_tokens,
    )
