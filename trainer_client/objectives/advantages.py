"""Group-relative advantages: GRPO, Dr. GRPO and RLOO.

Invariant: a group whose rewards are all equal has advantage exactly 0 for every sample. Otherwise rounding in its mean,
divided by almost nothing, would train on noise.

All take rewards as a float tensor [groups, G], or, for groups of unequal size, flat as [ΣG] with `group_sizes` int64
[groups]; all compute in float64 and return the rewards' shape and dtype.

Samples may be rows of trajectories: `trajectories`, int64 [ΣG], says which. Mean and std are then over trajectories,
which weigh the same: the mean is that of the means of their rows, the variance that of the means of their rows' squared
distances from it. A row's own reward is compared with them. Where rows share their trajectory's reward, each has the
trajectory's advantage. `policies`, int64 [ΣG]: rows are compared with those of their
own policy alone. So roles of a game have a baseline each, as in SPIRAL (arXiv:2506.24119).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from buffer_wire.errors import InvalidField
from trainer_client.objectives.tokens import check_positive


def grpo_advantages(
    rewards: Tensor,
    group_sizes: Tensor | None = None,
    *,
    trajectories: Tensor | None = None,
    policies: Tensor | None = None,
    eps: float = 1e-6,
    unbiased: bool = True,
) -> Tensor:
    """Compute GRPO's advantages: Â_i = (r_i − mean(r)) / (std(r) + eps), mean and std over the sample's group.

    Source: DeepSeekMath (arXiv:2402.03300), section 4.1.2, which leaves the kind of std open. With `unbiased` it
    divides by G − 1 as the common implementations do (`torch.std`); otherwise by G.

    Raises `InvalidField` for another shape or dtype, or groups of no sample.
    """
    check_positive("eps", eps)
    of = _compared(rewards, group_sizes, trajectories, policies)
    degrees = (of.counts - 1).clamp(min=1) if unbiased else of.counts
    scaled = of.centred / ((of.squares / degrees).sqrt() + eps)
    return of.shaped(scaled, rewards)


def dr_grpo_advantages(
    rewards: Tensor,
    group_sizes: Tensor | None = None,
    *,
    trajectories: Tensor | None = None,
    policies: Tensor | None = None,
) -> Tensor:
    """Compute Dr. GRPO's advantages: Â_i = r_i − mean(r), the mean over the sample's group.

    Source: Dr. GRPO, "Understanding R1-Zero-Like Training" (arXiv:2503.20783), section 3.2: without the division by
    std, groups of almost equal rewards weigh no more than others.

    Raises `InvalidField` for another shape or dtype, or groups of no sample.
    """
    of = _compared(rewards, group_sizes, trajectories, policies)
    return of.shaped(of.centred, rewards)


def rloo_advantages(
    rewards: Tensor,
    group_sizes: Tensor | None = None,
    *,
    trajectories: Tensor | None = None,
    policies: Tensor | None = None,
) -> Tensor:
    """Compute RLOO's advantages: Â_i = r_i − 1/(G − 1) · Σ_{j≠i} r_j.

    The baseline is the mean over the group's other samples. Source: RLOO, "Back to Basics" (arXiv:2402.14740), which
    takes the estimator from Kool et al., "Buy 4 REINFORCE Samples, Get a Baseline for Free!" (2019). It is Dr. GRPO's
    advantage times G / (G − 1): the baseline does not depend on the sample itself. Some trainers normalise the result
    over the batch as well; the paper does not.

    Raises `InvalidField` for another shape or dtype, and for groups of one sample, which leave no sample for the
    baseline. With `trajectories` such a group has advantage 0: the others may have been left out.
    """
    of = _compared(rewards, group_sizes, trajectories, policies)
    if trajectories is None and bool((of.counts < 2).any()):
        name = "rewards.shape" if group_sizes is None else "group_sizes"
        given = list(rewards.shape) if group_sizes is None else group_sizes.tolist()
        raise InvalidField(name, given, "groups of 2 samples or more, for one to be left out")
    others = (of.counts - 1).clamp(min=1)
    return of.shaped(of.own * of.counts / others + of.beyond, rewards)


@dataclass(frozen=True, slots=True)
class _Compared:
    """Rows beside the trajectories of their group, and policy, with which they are compared; each float64 [ΣG]."""

    own: Tensor
    """Mean reward of the row's trajectory, less the mean over the trajectories."""
    beyond: Tensor
    """Reward of the row, less that of its trajectory."""
    squares: Tensor
    """Sum over the trajectories of the mean squared distance of their rows from the mean over the trajectories."""
    counts: Tensor
    """Trajectories."""
    same: Tensor
    """True where all rows have the same reward, bool."""

    @property
    def centred(self) -> Tensor:
        """Reward of the row, less the mean over the trajectories."""
        return self.own + self.beyond

    def shaped(self, advantages: Tensor, rewards: Tensor) -> Tensor:
        """Shape the advantages as the rewards, exactly 0 where all rows have the same."""
        return torch.where(self.same, 0.0, advantages).to(rewards.dtype).reshape(rewards.shape)


def _compared(
    rewards: Tensor, group_sizes: Tensor | None, trajectories: Tensor | None, policies: Tensor | None
) -> _Compared:
    flat, sizes = _flatten(rewards, group_sizes)
    groups = torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes)
    if policies is not None:
        groups = _numbered(groups, _checked("policies", policies, groups))
    rows = torch.arange(len(flat), device=flat.device)
    if trajectories is not None:
        rows = _numbered(groups, _checked("trajectories", trajectories, groups))
    count, classes = int(rows.max()) + 1 if len(rows) else 0, int(groups.max()) + 1 if len(groups) else 0
    of_trajectory = _mean(flat, rows, count)
    group_of = torch.zeros(count, dtype=torch.int64, device=flat.device).scatter(0, rows, groups)
    mean = _mean(of_trajectory, group_of, classes)
    own, spread = of_trajectory - mean[group_of], _mean((flat - mean[groups]).square(), rows, count)
    low = torch.full_like(mean, torch.inf).scatter_reduce(0, groups, flat, "amin")
    high = torch.full_like(mean, -torch.inf).scatter_reduce(0, groups, flat, "amax")
    counts = torch.bincount(group_of, minlength=classes).double()
    return _Compared(
        own[rows],
        flat - of_trajectory[rows],
        _sum(spread, group_of, classes)[groups],
        counts[groups],
        (low == high)[groups],
    )


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


def _checked(name: str, given: Tensor, groups: Tensor) -> Tensor:
    if given.shape != groups.shape or given.dtype != torch.int64:
        what = f"{given.dtype} {list(given.shape)}"
        raise InvalidField(name, what, f"torch.int64 {list(groups.shape)}, one for each sample")
    return given


def _numbered(first: Tensor, second: Tensor) -> Tensor:
    """Number the pairs that there are, from 0."""
    pairs: tuple[Tensor, Tensor] = torch.unique(torch.stack([first, second]), dim=1, return_inverse=True)
    return pairs[1]


def _sum(values: Tensor, index: Tensor, count: int) -> Tensor:
    return torch.zeros(count, dtype=values.dtype, device=values.device).index_add(0, index, values)


def _mean(values: Tensor, index: Tensor, count: int) -> Tensor:
    return _sum(values, index, count) / torch.bincount(index, minlength=count)
