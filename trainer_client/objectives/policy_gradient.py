"""Policy gradient with importance weights: REINFORCE on tokens.

    J(θ) = Σ_t w_t · Â_t · log π_θ(y_t)        divided as `denominators` says; the loss is −J

with w_t computed once and passed in: `tis_weights` (truncated), `mis_weights` (masked), a product of both, or none.

Shapes and dtypes are those of every loss here: `logprobs` float32 or float64, [B, T] or [ΣT]; other log-probabilities
and `weights` floating of the same shape, cut off from any graph; `advantages` floating of the same shape, or [B] beside
[B, T]; `loss_mask` bool or integer of the same shape. The result is a scalar in the dtype of `logprobs`, differentiable
in `logprobs` only. `token_counts`, int64 [B], tells packed samples apart where something is per sample.
`sample_tokens`, int64 [B]: see `denominators`. Errors are `InvalidField`, naming the argument.
"""

import torch
from torch import Tensor

from trainer_client.objectives.denominators import Total, mean_loss
from trainer_client.objectives.tokens import check_logprobs, token_advantages, token_mask, token_weights


def policy_gradient_loss(
    logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    weights: Tensor | None = None,
    loss_tokens: Total | None = None,
    total_samples: Total | None = None,
    token_counts: Tensor | None = None,
    sample_tokens: Tensor | None = None,
) -> Tensor:
    """Compute the policy gradient loss, −J of the module's docstring: ∂/∂log π_t = −w_t · Â_t over the denominator.

    Sources: Williams, "REINFORCE" (1992); with `weights=tis_weights(logprobs, ...)` it is the corrected gradient of Yao
    et al. (2025), the token-level rollout correction of verl and `--use-tis` of slime and Miles.
    """
    check_logprobs("logprobs", logprobs)
    mask = token_mask(loss_mask, logprobs)
    factor = token_weights(weights, logprobs, mask) * torch.where(mask, token_advantages(advantages, logprobs), 0.0)
    return mean_loss(
        -factor * torch.where(mask, logprobs, 0.0),
        mask,
        loss_tokens=loss_tokens,
        total_samples=total_samples,
        token_counts=token_counts,
        sample_tokens=sample_tokens,
    )
