"""Group-relative advantages: GRPO, Dr. GRPO and RLOO.

Invariant: a group whose rewards are all equal has advantage exactly 0 for every sample. Otherwise rounding in its mean,
divided by almost nothing, would train on noise.

All take rewards as a float tensor [groups, G], or, for groups of unequal size, flat as [ΣG] with `group_sizes` int64
[groups]; all compute in float64 and return the rewards' shape and dtype.
"""

import torch
from torch import Tensor

from buffer_wire.errors import InvalidField
from trainer_client.objectives.tokens import check_positive


def grpo_advantages(
    rewards: Tensor, group_sizes: Tensor | None = None, *, eps: float = 1e-6, unbiased: bool = True
) -> Tensor:
    """Compute GRPO's advantages: Â_i = (r_i − mean(r)) / (std(r) + eps), mean and std over the sample's group.

    Source: DeepSeekMath (arXiv:2402.03300), section 4.1.2, which leaves the kind of std open. With `unbiased` it
    divides by G − 1 as the common implementations do (`torch.std`); otherwise by G.

    Raises `InvalidField` for another shape or dtype, or groups of no sample.
    """
    check_positive("eps", eps)
    flat, sizes = _flatten(rewards, group_sizes)
    centred, same = _centred(flat, sizes)
    counts = sizes.double()
    degrees = (counts - 1).clamp(min=1) if unbiased else counts
    std = (_sum_by_group(centred.square(), sizes) / degrees).sqrt()
    scaled = centred / (torch.repeat_interleave(std, sizes) + eps)
    return torch.where(same, 0.0, scaled).to(rewards.dtype).reshape(rewards.shape)


def dr_grpo_advantages(rewards: Tensor, group_sizes: Tensor | None = None) -> Tensor:
    """Compute Dr. GRPO's advantages: Â_i = r_i − mean(r), the mean over the sample's group.

    Source: Dr. GRPO, "Understanding R1-Zero-Like Training" (arXiv:2503.20783), section 3.2: without the division by
    std, groups of almost equal rewards weigh no more than others.

    Raises `InvalidField` for another shape or dtype, or groups of no sample.
    """
    flat, sizes = _flatten(rewards, group_sizes)
    centred, same = _centred(flat, sizes)
    return torch.where(same, 0.0, centred).to(rewards.dtype).reshape(rewards.shape)


def rloo_advantages(rewards: Tensor, group_sizes: Tensor | None = None) -> Tensor:
    """Compute RLOO's advantages: Â_i = r_i − 1/(G − 1) · Σ_{j≠i} r_j.

    The baseline is the mean over the group's other samples. Source: RLOO, "Back to Basics" (arXiv:2402.14740), which
    takes the estimator from Kool et al., "Buy 4 REINFORCE Samples, Get a Baseline for Free!" (2019). It is Dr. GRPO's
    advantage times G / (G − 1): the baseline does not depend on the sample itself. Some trainers normalise the result
    over the batch as well; the paper does not.

    Raises `InvalidField` for another shape or dtype, and for groups of one sample, which leave no sample for the
    baseline.
    """
    flat, sizes = _flatten(rewards, group_sizes)
    if bool((sizes < 2).any()):
        name = "rewards.shape" if group_sizes is None else "group_sizes"
        raise InvalidField(name, sizes.tolist(), "groups of 2 samples or more, for one to be left out")
    centred, same = _centred(flat, sizes)
    counts = torch.repeat_interleave(sizes, sizes).double()
    return torch.where(same, 0.0, centred * counts / (counts - 1)).to(rewards.dtype).reshape(rewards.shape)


def _flatten(rewards: Tensor, group_sizes: Tensor | None) -> tuple[Tensor, Tensor]:
    """Flatten to rewards, float64 [ΣG], and group sizes, int64 [groups]."""
    if not rewards.dtype.is_floating_point:
        raise InvalidField("rewards.dtype", rewards.dtype, "a floating dtype")
    shape = list(rewards.shape)
    if group_sizes is None:
        if rewards.ndim != 2 or shape[1] == 0:
            raise InvalidField("rewards.shape", shape, "[groups, G], or [ΣG] with group_sizes")
        sizes = torch.full((shape[0],), shape[1], dtype=torch.int64, device=rewards.device)
        return rewards.detach().double().reshape(-1), sizes
    if rewards.ndim != 1:
        raise InvalidField("rewards.shape", shape, "[ΣG] where group_sizes is given")
    if group_sizes.ndim != 1 or group_sizes.dtype != torch.int64:
        raise InvalidField("group_sizes", f"{group_sizes.dtype} {list(group_sizes.shape)}", "torch.int64 [groups]")
    if bool((group_sizes < 1).any()) or int(group_sizes.sum()) != shape[0]:
        raise InvalidField("group_sizes", group_sizes.tolist(), f"positive and add up to the {shape[0]} rewards")
    return rewards.detach().double(), group_sizes


def _centred(flat: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Subtract the group's mean from each reward, and tell whether all rewards of its group are equal; both [ΣG]."""
    mean = _sum_by_group(flat, sizes) / sizes.double()
    groups = _group_index(sizes)
    low = torch.full_like(mean, torch.inf).scatter_reduce(0, groups, flat, "amin")
    high = torch.full_like(mean, -torch.inf).scatter_reduce(0, groups, flat, "amax")
    return flat - mean[groups], (low == high)[groups]


def _sum_by_group(flat: Tensor, sizes: Tensor) -> Tensor:
    return torch.zeros(len(sizes), dtype=flat.dtype, device=flat.device).index_add(0, _group_index(sizes), flat)


def _group_index(sizes: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes)
