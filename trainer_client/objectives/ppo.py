"""PPO's clipped surrogate, decoupled from the policy that generated.

    J(θ) = Σ_t w_t · min(r_t · Â_t, clip(r_t, 1 − clip_low, 1 + clip_high) · Â_t)        r_t = π_θ / π_old

divided as `denominators` says; the loss is −J. π_old is the proximal policy, from which one batch may move θ only so
far: the trainer's own weights before the first optimizer step on the batch. Who generated is another policy, and the
weights w_t = π_old / π_behaviour correct for it. This is

- PPO (Schulman et al., arXiv:1707.06347, equation 7; the two bounds apart as in DAPO, arXiv:2503.14476): no weights;
- PPO with TIS or MIS: `weights=tis_weights(old_logprobs, behaviour_logprobs, ...)` or `mis_weights(...)`;
- decoupled PPO (Hilton et al., arXiv:2110.00641, L^CLIP with π_prox and π_behav apart; AReaL, arXiv:2505.24298,
  section 5.2): the same, with `cap=math.inf`; AReaL's code also bounds the weight (by 5): its `token_mask` is
  `mis_weights(..., low=0, high=5)`, its `token_truncate` is `tis_weights(..., cap=5)`.

π_old costs one more forward pass over the batch. `interpolated_logprobs` saves it.
"""

import math

import torch
from torch import Tensor

from trainer_client.objectives.denominators import Total, mean_loss
from trainer_client.objectives.tokens import (
    check_clip,
    check_logprobs,
    check_same_tokens,
    masked_log_ratio,
    token_advantages,
    token_mask,
    token_staleness,
    token_weights,
)


def ppo_loss(  # noqa: PLR0913  # each is a quantity of the formula
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    weights: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    loss_tokens: Total | None = None,
    total_samples: Total | None = None,
    token_counts: Tensor | None = None,
) -> Tensor:
    """−J of the module's docstring, with the shapes, dtypes and errors of `policy_gradient_loss`.

    With Â ≥ 0 tokens beyond 1 + `clip_high`, and with Â < 0 tokens below 1 − `clip_low`, have no gradient; all others
    −w_t · r_t · Â_t. 0 < `clip_low` < 1, `clip_high` > 0.
    """
    check_logprobs("logprobs", logprobs)
    check_same_tokens("old_logprobs", old_logprobs, logprobs)
    check_clip(clip_low, clip_high)
    mask = token_mask(loss_mask, logprobs)
    advantage = torch.where(mask, token_advantages(advantages, logprobs), 0.0)
    log_ratio = masked_log_ratio(logprobs, old_logprobs.detach(), mask)
    surrogate = clipped_ratio(log_ratio, advantage, clip_low, clip_high) * advantage
    return mean_loss(
        -token_weights(weights, logprobs, mask) * surrogate,
        mask,
        loss_tokens=loss_tokens,
        total_samples=total_samples,
        token_counts=token_counts,
    )


def clipped_ratio(log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """The r' with r' · Â = min(r · Â, clip(r) · Â), from log r.

    The minimum bounds r from above where Â ≥ 0 and from below where Â < 0. Bounding its logarithm gives the same number
    and, for ratios beyond the dtype's range, no NaN in the gradient.
    """
    from_above = log_ratio.clamp(max=math.log1p(clip_high))
    from_below = log_ratio.clamp(min=math.log1p(-clip_low))
    return torch.where(advantage >= 0, from_above, from_below).exp()


def interpolated_logprobs(logprobs: Tensor, behaviour_logprobs: Tensor, staleness: Tensor) -> Tensor:
    """An estimate of log π_old that saves its forward pass, from the policies before and after it and the staleness d.

        log π_old ≈ log π_behaviour + α · (log π_θ − log π_behaviour)        α = (d − 1) / d, and 0 where d ≤ 1

    It takes log π to move by equal steps from version to version, and π_old to be one version older than π_θ. Source:
    A-3PO (arXiv:2512.06547), AReaL's `prox_logp_method: loglinear` (docs/algorithms/prox_approx.md; in its code d is
    current_version − version, and α is clamped to [0, 1]).

    `logprobs`: float32 or float64 [B, T] or [ΣT], of the forward pass in hand. `behaviour_logprobs`: floating, same
    shape. `staleness`: integer, in versions, same shape (`batch.train_version - batch.versions`), or [B] beside [B, T].
    Returns the shape and dtype of `logprobs`, without a graph; what stands at masked positions has no meaning.

    Raises `InvalidField`, naming the argument.
    """
    check_logprobs("logprobs", logprobs)
    check_same_tokens("behaviour_logprobs", behaviour_logprobs, logprobs)
    age = token_staleness(staleness, logprobs).clamp(min=1).to(logprobs.dtype)
    behaviour = behaviour_logprobs.detach().to(logprobs.dtype)
    return torch.lerp(behaviour, logprobs.detach(), (age - 1) / age)
