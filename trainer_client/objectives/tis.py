"""Truncated importance sampling: a capped, detached weight that corrects for who generated the tokens.

    w_t = min(π_train(y_t) / π_behaviour(y_t), C)

π_behaviour is what the rollout engine reported, π_train the trainer's own probability of the same token under
the weights at which the correction is made. Sources: Ionides, "Truncated Importance Sampling" (2008); Yao et
al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025); the same weight multiplies
the policy-gradient loss in verl (rollout importance sampling, token level) and in slime and Miles
(`--use-tis`, `--tis-clip`, 2 by default).

Shapes and dtypes are those of every objective here: log-probabilities float32 or float64 [B, T] or [ΣT],
behaviour and old log-probabilities floating of the same shape, advantages the same shape or [B] beside
[B, T], loss_mask bool or integer. `loss_tokens` is the denominator: the whole batch's loss tokens where a call
sees only a part of it; default: the tokens of the call. Errors are `InvalidField`, naming the argument.
"""

import math

import torch
from torch import Tensor

from buffer_wire.errors import InvalidField
from trainer_client.objectives.tokens import (
    LossTokens,
    check_logprobs,
    check_positive,
    check_same_tokens,
    masked_log_ratio,
    masked_mean_over,
    token_advantages,
    token_mask,
)


def tis_weights(train_logprobs: Tensor, behaviour_logprobs: Tensor, loss_mask: Tensor, *, cap: float) -> Tensor:
    """w_t = min(π_train / π_behaviour, `cap`), without a graph; 0 at masked positions.

    Returns the shape and dtype of `train_logprobs`.
    """
    check_logprobs("train_logprobs", train_logprobs)
    check_same_tokens("behaviour_logprobs", behaviour_logprobs, train_logprobs)
    check_positive("cap", cap)
    mask = token_mask(loss_mask, train_logprobs)
    log_ratio = masked_log_ratio(train_logprobs.detach(), behaviour_logprobs.detach(), mask)
    return torch.where(mask, log_ratio.clamp(max=math.log(cap)).exp(), 0.0)


def tis_policy_gradient_loss(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    cap: float = 2.0,
    loss_tokens: LossTokens | None = None,
) -> Tensor:
    """−1/Σ|y| · Σ_t w_t · Â_t · log π_θ(y_t), with w_t from π_train = π_θ: a scalar.

    ∂/∂log π_t = −w_t · Â_t / Σ|y|; capped tokens keep C · Â_t.
    """
    weights = tis_weights(logprobs, behaviour_logprobs, loss_mask, cap=cap)
    mask = token_mask(loss_mask, logprobs)
    advantage = torch.where(mask, token_advantages(advantages, logprobs), 0.0)
    return masked_mean_over(loss_tokens, -weights * advantage * torch.where(mask, logprobs, 0.0), mask)


def tis_ppo_loss(  # noqa: PLR0913  # each is a quantity of the formula
    logprobs: Tensor,
    old_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    cap: float = 2.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    loss_tokens: LossTokens | None = None,
) -> Tensor:
    """−1/Σ|y| · Σ_t w_t · min(r_t · Â_t, clip(r_t, 1 − clip_low, 1 + clip_high) · Â_t): a scalar.

    r_t = π_θ / π_old, with π_old the trainer's log-probabilities before the first optimizer step on this
    batch (`old_logprobs`), and w_t from π_train = π_old. The PPO term is Schulman et al. (arXiv:1707.06347),
    equation 7, with the two bounds apart as in DAPO (arXiv:2503.14476). With Â ≥ 0 tokens beyond
    1 + clip_high, and with Â < 0 tokens below 1 − clip_low, have no gradient; all others w_t · r_t · Â_t.
    """
    check_logprobs("logprobs", logprobs)
    check_same_tokens("old_logprobs", old_logprobs, logprobs)
    if not 0 < clip_low < 1:
        raise InvalidField("clip_low", clip_low, "between 0 and 1")
    check_positive("clip_high", clip_high)
    weights = tis_weights(old_logprobs.to(logprobs.dtype), behaviour_logprobs, loss_mask, cap=cap)
    mask = token_mask(loss_mask, logprobs)
    advantage = torch.where(mask, token_advantages(advantages, logprobs), 0.0)

    # min(r·Â, clip(r)·Â) bounds r from above where Â ≥ 0 and from below where Â < 0. Bounding its logarithm
    # gives the same number and, for ratios beyond the dtype's range, no NaN in the gradient.
    log_ratio = masked_log_ratio(logprobs, old_logprobs.detach(), mask)
    bounded = torch.where(
        advantage >= 0, log_ratio.clamp(max=math.log1p(clip_high)), log_ratio.clamp(min=math.log1p(-clip_low))
    )
    return masked_mean_over(loss_tokens, -weights * advantage * bounded.exp(), mask)
