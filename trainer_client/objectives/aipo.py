"""AIPO: asynchronous importance-weighted policy optimisation with a one-sided clip.

Source: LlamaRL (arXiv:2505.24034), per token, without entropy and KL terms:

    J(θ) = 1 / Σ_samples |y| · Σ_t min(ρ_t, δ) · Â_t        ρ_t = π_θ(y_t | y_<t) / μ(y_t | y_<t)

with μ the policy that generated the token. `aipo_loss` returns −J. Σ_samples |y| is the token mean, one of the
denominators of `denominators`.

The formula has two readings. They agree in value and on every token with ρ ≤ δ, and differ only in the gradient of
clipped tokens:

    ratio_detached         ∂J/∂log π_t = min(ρ_t, δ) · Â_t / Σ|y|            clipped: δ · Â_t / Σ|y|
    ratio_differentiated   ∂J/∂log π_t = ρ_t · Â_t · [ρ_t ≤ δ] / Σ|y|        clipped: 0

The first is LlamaRL's gradient estimator (the ratio is a weight on ∇ log π), the second differentiates J as it is
written.
"""

import math
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from buffer_wire.errors import InvalidField
from trainer_client.objectives.denominators import Total, mean_loss
from trainer_client.objectives.tokens import (
    check_positive,
    log_ratios,
    token_advantages,
)

AipoReading: TypeAlias = Literal["ratio_detached", "ratio_differentiated"]


def aipo_loss(  # noqa: PLR0913  # each is a quantity of the formula
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    delta: float,
    reading: AipoReading = "ratio_detached",
    loss_tokens: Total | None = None,
    total_samples: Total | None = None,
    token_counts: Tensor | None = None,
    sample_tokens: Tensor | None = None,
) -> Tensor:
    """Compute the AIPO loss, −J of the module's docstring, as `policy_gradient_loss` in shapes, dtypes and errors.

    `behaviour_logprobs`: log μ. `delta`: the clip δ > 0; LlamaRL uses 2 to 10.
    """
    check_positive("delta", delta)
    log_ratio, mask = log_ratios(logprobs, behaviour_logprobs, loss_mask, "behaviour_logprobs")
    advantage = token_advantages(advantages, logprobs)

    # The clip comes before exp, so that a ratio beyond the dtype's range leaves no NaN in the gradient.
    clipped_ratio = log_ratio.clamp(max=math.log(delta)).exp()
    if reading == "ratio_detached":
        # 1 + log π − sg(log π) has value 1 and the gradient of log π.
        weighted = clipped_ratio.detach() * (1.0 + log_ratio - log_ratio.detach())
    elif reading == "ratio_differentiated":
        weighted = clipped_ratio
    else:
        raise InvalidField("reading", reading, f"one of {', '.join(get_args(AipoReading))}")
    return mean_loss(
        -torch.where(mask, advantage, 0.0) * weighted,
        mask,
        loss_tokens=loss_tokens,
        total_samples=total_samples,
        token_counts=token_counts,
        sample_tokens=sample_tokens,
    )
