"""Importance weights: detached factors on a loss that correct for the policy that generated the tokens.

    ρ = π_train(y) / π_behaviour(y)        TIS: min(ρ, cap)        MIS: ρ where low ≤ ρ ≤ high, else 0

    trust: 1 where the mean over the sample of KL(Bernoulli(μ_t) ‖ Bernoulli(π_t)) ≤ delta, else 0

μ_t and π_t are the two probabilities of token t, and μ·log(μ/π) + (1 − μ)·log((1 − μ)/(1 − π)) their divergence.

π_behaviour is the probability that the rollout engine reported. π_train is the trainer's own probability of the same
token under the weights at which the correction is made. For `policy_gradient_loss` these are the weights in training.
For `ppo_loss`, `gspo_loss` and `cispo_loss` they are those before the first optimizer step on the batch. All four take
the result as `weights=`. `aipo_loss` does not: its own ratio is this correction.

Levels: of each token; of the whole "sequence", Π ρ_t, which corrects without bias and varies wildly with length; and
the "geometric" mean of the sequence, (Π ρ_t)^(1/|y|), which does not grow with length. Products run over the loss mask,
and every token of a sample has the sample's weight. At the sequence levels a sample may not be cut over micro-batches,
and packed tokens need `token_counts`.

Sources. TIS: Ionides, "Truncated Importance Sampling" (2008); Yao et al., "Your Efficient RL Framework Secretly Brings
You Off-Policy RL Training" (2025). MIS: Liu et al., "When Speed Kills Stability: Demystifying RL Collapse from the
Training-Inference Mismatch" (2025), of tokens and sequences; IcePop (arXiv:2510.18855), of tokens. Trust: the sequence
trust region of FlashREINFORCE (Hu et al., 2026, github.com/yifanzhang-pro/FlashREINFORCE); the divergence is DPPO's
binary KL (arXiv:2602.04879). AReaL's `token_mask` with cap C is MIS with `low=0, high=C`, its `token_truncate` is TIS.
Frameworks differ in

- the geometric level: here the weight itself is the geometric mean, as in slime's `mis.py` (`tis_level: geometric`); to
  reject by one level and weigh by another, multiply two weights, the rejecting one turned into 0 and 1 by `(w > 0)`;
- the denominator: tokens of weight 0 stay in it here and in Miles' IcePop; verl's rejection and slime's mask mode take
  them out of the response mask. For that, pass `loss_mask & (weights > 0)` and that mask's total over the batch.
"""

import math

import torch
from torch import Tensor

from buffer_wire.errors import InvalidField
from trainer_client.objectives.samples import RatioLevel, Samples, log_ratio_at
from trainer_client.objectives.tokens import (
    check_bounds,
    check_logprobs,
    check_positive,
    check_same_tokens,
    log_bound,
    log_ratios,
    token_mask,
)

_LARGEST_LOGPROB = math.log1p(-1e-6)


def tis_weights(
    train_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    cap: float,
    level: RatioLevel = "token",
    token_counts: Tensor | None = None,
) -> Tensor:
    """Compute truncated importance sampling weights, min(ρ, `cap`), without a graph; 0 at masked positions.

    `train_logprobs`: float32 or float64 [B, T] or [ΣT]. `behaviour_logprobs`: floating, same shape. `loss_mask`: bool
    or integer, same shape. `cap`: above 0; slime and Miles use 2 (`--tis-clip`), AReaL 5; math.inf: none.
    `token_counts`: int64 [B], for packed tokens at the levels of a sample. Returns the shape and dtype of
    `train_logprobs`.

    Raises `InvalidField`, naming the argument.
    """
    if math.isnan(cap) or cap <= 0:
        raise InvalidField("cap", cap, "above 0; math.inf for no cap")
    log_ratio, mask = _log_ratio(train_logprobs, behaviour_logprobs, loss_mask, level, token_counts)
    return torch.where(mask, log_ratio.clamp(max=math.log(cap)).exp(), 0.0)


def mis_weights(
    train_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    low: float = 0.5,
    high: float = 2.0,
    level: RatioLevel = "token",
    token_counts: Tensor | None = None,
) -> Tensor:
    """Compute masked importance sampling weights, ρ where `low` ≤ ρ ≤ `high`, else 0; without a graph.

    Masked positions have weight 0. 0 ≤ `low` < `high`, which may be math.inf; usual are 0.5 and 2 for tokens, and much
    closer to 1 for the geometric level, where verl's recipes use 0.999 and 1.001. Else as `tis_weights`.
    """
    check_bounds(low, high)
    log_ratio, mask = _log_ratio(train_logprobs, behaviour_logprobs, loss_mask, level, token_counts)
    # Bounded before exp: what lies beyond is dropped, and must not have become inf.
    inside = log_ratio.clamp(log_bound(low), log_bound(high))
    return torch.where(mask & (inside == log_ratio), inside.exp(), 0.0)


def trust_weights(
    train_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    delta: float,
    token_counts: Tensor | None = None,
) -> Tensor:
    """Compute weights that reject whole samples by binary KL: 1 for the tokens of a trusted sample, 0 for others.

    Without a graph; 0 at masked positions. `delta`: above 0, in nats a token. Probabilities count as at most 1 − 1e-6,
    beyond which float32 does not tell them from 1. Multiply by `tis_weights` for the ratio. Else as `tis_weights`.
    """
    check_positive("delta", delta)
    check_logprobs("train_logprobs", train_logprobs)
    check_same_tokens("behaviour_logprobs", behaviour_logprobs, train_logprobs)
    mask = token_mask(loss_mask, train_logprobs)
    samples = Samples.of(train_logprobs, token_counts)

    def outcomes(logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the logarithms of the token's probability, and of that of all others together."""
        token = torch.where(mask, logprobs.detach().to(train_logprobs.dtype), -1.0).clamp(max=_LARGEST_LOGPROB)
        return token, torch.log(-torch.expm1(token))

    token, others = outcomes(behaviour_logprobs)
    trained_token, trained_others = outcomes(train_logprobs)
    divergence = token.exp() * (token - trained_token) + others.exp() * (others - trained_others)
    trusted = samples.spread(samples.means(divergence, mask) <= delta)
    return (mask & trusted).to(train_logprobs.dtype)


def _log_ratio(
    train_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    loss_mask: Tensor,
    level: RatioLevel,
    token_counts: Tensor | None,
) -> tuple[Tensor, Tensor]:
    log_ratio, mask = log_ratios(
        train_logprobs.detach(), behaviour_logprobs, loss_mask, "behaviour_logprobs", name="train_logprobs"
    )
    return log_ratio_at(level, log_ratio, mask, token_counts), mask
