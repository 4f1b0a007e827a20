"""Samples within tensors of tokens, and figures over whole samples.

In padded tensors [B, T] the rows are the samples. Packed tensors [ΣT] hold the B samples one after another, and
`token_counts`, int64 [B], gives each one's number of tokens. `per_token` takes the same counts; a packed batch has them
as `cu_seqlens.diff().long()`.

Invariant: a figure of a sample needs all of its tokens, so a sample may not be cut over micro-batches or ranks.
"""

from dataclasses import dataclass
from typing import Literal, Self, TypeAlias

import torch
from torch import Tensor

from buffer_wire.errors import InvalidField

RatioLevel: TypeAlias = Literal["token", "sequence", "geometric"]
"""Level of a ratio: the token; the whole sample, Π_t ρ_t; or its geometric mean, (Π_t ρ_t)^(1/|y|)."""

RATIO_LEVELS: tuple[RatioLevel, ...] = ("token", "sequence", "geometric")


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of a tensor of tokens, B of them."""

    count: int
    """Number of samples B."""
    index: Tensor | None
    """Index of the sample of each packed token, int64 [ΣT]; None where the rows of [B, T] are the samples."""

    @classmethod
    def of(cls, tokens: Tensor, token_counts: Tensor | None) -> Self:
        """Find the samples of `tokens`, [B, T] without or [ΣT] with `token_counts`.

        Raises `InvalidField` where the counts are missing, superfluous or do not add up to ΣT.
        """
        if tokens.ndim == 2:
            if token_counts is not None:
                raise InvalidField("token_counts", list(token_counts.shape), "None beside [B, T]: rows are samples")
            return cls(tokens.shape[0], None)
        if token_counts is None:
            raise InvalidField("token_counts", None, "int64 [B] beside packed tokens, to tell the samples apart")
        if token_counts.ndim != 1 or token_counts.dtype != torch.int64:
            raise InvalidField("token_counts", f"{token_counts.dtype} {list(token_counts.shape)}", "torch.int64 [B]")
        if bool((token_counts < 0).any()) or int(token_counts.sum()) != tokens.shape[0]:
            raise InvalidField("token_counts", token_counts.tolist(), f"counts that add up to {tokens.shape[0]} tokens")
        order = torch.arange(len(token_counts), device=token_counts.device)
        return cls(len(token_counts), torch.repeat_interleave(order, token_counts).to(tokens.device))

    def sums(self, values: Tensor) -> Tensor:
        """Sum `values`, one number per token, over each sample: [B]."""
        if self.index is None:
            return values.sum(dim=1)
        return torch.zeros(self.count, dtype=values.dtype, device=values.device).index_add(0, self.index, values)

    def means(self, values: Tensor, mask: Tensor) -> Tensor:
        """Average `values` over each sample's tokens in `mask`: [B]; 0 for a sample without any."""
        counted = self.sums(mask.to(values.dtype)).clamp(min=1)
        return self.sums(torch.where(mask, values, 0.0)) / counted

    def spread(self, values: Tensor) -> Tensor:
        """Shape `values`, one per sample [B], so that they broadcast against the tokens."""
        return values.unsqueeze(1) if self.index is None else values[self.index]


def log_ratio_at(level: RatioLevel, log_ratio: Tensor, mask: Tensor, token_counts: Tensor | None) -> Tensor:
    """Convert the log ratios of tokens (0 outside `mask`) to a level, in their shape: every token has its sample's.

    Raises `InvalidField` for another level, and for the levels of a sample where its tokens cannot be told.
    """
    if level not in RATIO_LEVELS:
        raise InvalidField("level", level, f"one of {', '.join(RATIO_LEVELS)}")
    if level == "token":
        return log_ratio
    samples = Samples.of(log_ratio, token_counts)
    of_sample = samples.sums(log_ratio) if level == "sequence" else samples.means(log_ratio, mask)
    return samples.spread(of_sample).expand_as(log_ratio)
