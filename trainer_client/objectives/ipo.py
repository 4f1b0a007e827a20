"""IPO, INTELLECT policy optimisation: masks tokens whose probability has moved too far, and holds the rest by KL.

    J_t = [−low ≤ π_t − μ_t ≤ high] · ρ_t · Â_t − τ · (log ρ_t)²        ρ_t = π_t / μ_t

with μ the policy that generated the token, π the one in training, both as probabilities of the token. `ipo_loss`
returns the loss −J over a denominator of `denominators`. Masked tokens stay in the denominator, and keep their KL term.

Sources. The default loss of PRIME-RL v0.5.0 (low = high = 0.2, τ = 0.001), and its `ipo` since, with 0.1. It joins the
binary total-variation mask of DPPO (arXiv:2602.04879) with the KL term of Kimi K2.5 (arXiv:2602.02276). DPPO's mask,
which is PRIME-RL's default today, asks for the sign of the advantage too. A token is masked only where the step would
move it further: π_t − μ_t > high with Â > 0, or π_t − μ_t < −low with Â < 0.
"""

import math

import torch
from torch import Tensor

from buffer_wire.errors import InvalidField
from trainer_client.objectives.denominators import Total, mean_loss
from trainer_client.objectives.tokens import (
    log_ratios,
    token_advantages,
)

_LARGEST_LOG_RATIO = 80.0
"""Bound on the log ratio, below the point where its exp leaves float32."""


def ipo_loss(  # noqa: PLR0913  # each is a quantity of the formula
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    mask_low: float = 0.2,
    mask_high: float = 0.2,
    by_sign: bool = False,
    kl: float = 1e-3,
    loss_tokens: Total | None = None,
    total_samples: Total | None = None,
    token_counts: Tensor | None = None,
    sample_tokens: Tensor | None = None,
) -> Tensor:
    """Compute the IPO loss, −J of the module's docstring, with the shapes, dtypes and errors of `policy_gradient_loss`.

    `behaviour_logprobs`: log μ. `mask_low`, `mask_high`: bounds on a difference of probabilities, at least 0; math.inf:
    none. `by_sign`: DPPO's mask. `kl`: τ, at least 0.
    """
    for name, bound in (("mask_low", mask_low), ("mask_high", mask_high)):
        if math.isnan(bound) or bound < 0:
            raise InvalidField(name, bound, "at least 0; math.inf for no bound")
    if not (math.isfinite(kl) and kl >= 0):
        raise InvalidField("kl", kl, "a finite number, at least 0")
    log_ratio, mask = log_ratios(logprobs, behaviour_logprobs, loss_mask, "behaviour_logprobs")
    advantage = token_advantages(advantages, logprobs)
    behaviour = behaviour_logprobs.detach().to(logprobs.dtype)

    moved = torch.where(mask, logprobs.detach().exp() - behaviour.exp(), 0.0)
    above, below = moved > mask_high, moved < -mask_low
    if by_sign:
        above, below = above & (advantage > 0), below & (advantage < 0)
    ratio = log_ratio.clamp(max=_LARGEST_LOG_RATIO).exp()
    gained = torch.where(mask & ~(above | below), advantage, 0.0) * ratio
    return mean_loss(
        kl * log_ratio**2 - gained,
        mask,
        loss_tokens=loss_tokens,
        total_samples=total_samples,
        token_counts=token_counts,
        sample_tokens=sample_tokens,
    )
