"""Denominators of losses: the one place where a sum over tokens becomes a mean.

    loss_tokens=N     token mean:   Σ_t ℓ_t / N                              every token weighs the same
    total_samples=S   sample mean:  Σ_i (1 / |y_i| · Σ_{t in i} ℓ_t) / S     every sample weighs the same
                      with sample_tokens=n:  Σ_i (1 / n_i · Σ_{t in i} ℓ_t) / S
    neither           the mean over this call's own tokens (of `gspo_loss`: over its samples)

|y_i| are the sample's tokens in the loss mask. The totals of the whole batch (`total_loss_tokens`, `total_samples`) are
equal on every rank. Given these, values and gradients of its parts add up to those of one call, however it is cut. For
a sample mean it is cut between samples. Tokens whose weight is 0 stay in the denominator.

Samples may be rows of trajectories. For every trajectory to weigh the same, S is `total_trajectories` and n, int64 [B],
`trajectory_loss_tokens`: the loss tokens of all rows of the sample's trajectory. Its rows may be cut apart.

Dr. GRPO's constant (arXiv:2503.20783, section 3.2: each sample's sum divided by a fixed length L, not by its own) is
`loss_tokens=total_samples * L`.

Where the total is known only after the last part, take `loss_tokens=1` (`total_samples=1`) and divide the gradients
then.
"""

from typing import TypeAlias

import torch
from torch import Tensor

from buffer_wire.errors import InvalidField
from trainer_client.objectives.samples import Samples
from trainer_client.objectives.tokens import check_positive

Total: TypeAlias = int | float | Tensor
"""Total of a batch: a positive number, or a scalar tensor, whose value is not checked."""


def mean_loss(
    token_losses: Tensor,
    mask: Tensor,
    *,
    loss_tokens: Total | None,
    total_samples: Total | None,
    token_counts: Tensor | None,
    sample_tokens: Tensor | None = None,
) -> Tensor:
    """Sum `token_losses` [B, T] or [ΣT] over `mask`, and divide as the module says: a scalar.

    No token at all gives 0, not NaN. Raises `InvalidField` for two denominators, for one that is not positive, and for
    a sample mean over packed tokens without `token_counts`. Raises it for `sample_tokens` without `total_samples`, and
    for another shape.
    """
    counted = token_losses.where(mask, 0.0)
    if total_samples is not None:
        if loss_tokens is not None:
            raise InvalidField("total_samples", total_samples, "None beside loss_tokens: a loss has one denominator")
        samples = Samples.of(token_losses, token_counts)
        means = samples.means(counted, mask) if sample_tokens is None else _over(sample_tokens, samples, counted)
        return means.sum() / _checked("total_samples", total_samples)
    if sample_tokens is not None:
        raise InvalidField("sample_tokens", "given", "None without total_samples")
    if loss_tokens is None:
        return counted.sum() / mask.sum().clamp(min=1)
    return counted.sum() / _checked("loss_tokens", loss_tokens)


def _over(sample_tokens: Tensor, samples: Samples, counted: Tensor) -> Tensor:
    """Divide each sample's sum by its number of tokens, [B]."""
    if sample_tokens.shape != (samples.count,) or sample_tokens.dtype != torch.int64:
        given = f"{sample_tokens.dtype} {list(sample_tokens.shape)}"
        raise InvalidField("sample_tokens", given, f"torch.int64 [{samples.count}], one for each sample")
    return samples.sums(counted) / sample_tokens.clamp(min=1)


def _checked(name: str, total: Total) -> Total:
    if isinstance(total, Tensor):
        if total.ndim != 0:
            raise InvalidField(f"{name}.shape", list(total.shape), "[] (a scalar)")
        return total.detach()
    check_positive(name, total)
    return total
