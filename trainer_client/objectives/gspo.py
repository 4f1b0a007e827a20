"""GSPO: clipping and importance ratios of whole sequences instead of tokens.

    J(θ) = 1/S · Σ_i min(s_i · Â_i, clip(s_i, 1 − clip_low, 1 + clip_high) · Â_i)
    s_i  = (π_θ(y_i) / π_old(y_i))^(1/|y_i|) = exp(1/|y_i| · Σ_t log(π_θ(y_t) / π_old(y_t)))

Source: "Group Sequence Policy Optimization" (arXiv:2507.18071), equations 5 and 7, and, where advantages differ within
a sample, its GSPO-token (equations 13 and 14):

    J(θ) = 1/S · Σ_i 1/|y_i| · Σ_t min(s_it · Â_it, clip(s_it) · Â_it)        s_it = sg[s_i] · π_θ(y_t) / sg[π_θ(y_t)]

Both have s_i's value and clip; with one advantage a sample they agree in value and gradient, so one function does both.
|y_i| are the sample's tokens in the loss mask: with tools between turns, only those that the policy made.

A sample may not be cut over micro-batches or context-parallel ranks: its ratio needs all of its tokens.
"""

import torch
from torch import Tensor

from trainer_client.objectives.denominators import Total, mean_loss
from trainer_client.objectives.ppo import clipped_ratio
from trainer_client.objectives.samples import Samples
from trainer_client.objectives.tokens import (
    check_clip,
    log_ratios,
    token_advantages,
    token_weights,
)


def gspo_loss(  # noqa: PLR0913  # each is a quantity of the formula
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    weights: Tensor | None = None,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    loss_tokens: Total | None = None,
    total_samples: Total | None = None,
    token_counts: Tensor | None = None,
    sample_tokens: Tensor | None = None,
) -> Tensor:
    """Compute the GSPO loss, −J of the module's docstring, as `policy_gradient_loss` in shapes, dtypes and errors.

    The clips are the paper's, two to three orders of magnitude below PPO's. `token_counts`, int64 [B], is needed for
    packed tokens. `total_samples`: S, the samples of the whole batch; default: those of this call, including the
    padding of `pack(multiple_of=…)`. With `loss_tokens` every token weighs the same, so that long samples weigh more
    than in the paper. `weights` multiply the tokens' terms.
    """
    check_clip(clip_low, clip_high)
    log_ratio, mask = log_ratios(logprobs, old_logprobs, loss_mask, "old_logprobs")
    advantage = torch.where(mask, token_advantages(advantages, logprobs), 0.0)
    samples = Samples.of(logprobs, token_counts)
    of_sample = samples.spread(samples.means(log_ratio.detach(), mask))
    # Zero in value; its gradient is that of log π_t.
    through = log_ratio - log_ratio.detach()
    surrogate = clipped_ratio(of_sample + through, advantage, clip_low, clip_high) * advantage
    if loss_tokens is None and total_samples is None:
        total_samples = max(samples.count, 1)
    return mean_loss(
        -token_weights(weights, logprobs, mask) * surrogate,
        mask,
        loss_tokens=loss_tokens,
        total_samples=total_samples,
        token_counts=token_counts,
        sample_tokens=sample_tokens,
    )
