"""Packed layout: samples end to end in one row of tokens, [ΣT], with their boundaries, as variable-length attention
takes.

Where the row is rounded up to a multiple, its padding is one segment of its own behind the samples. The segment has
boundaries and positions like a sample, so that no token of a sample attends to it. It has no loss, no version and no
sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from trainer_client.batch import Batch, Group
from trainer_client.collate.facts import (
    Advantages,
    Chosen,
    Collated,
    Extras,
    Row,
    at_least_one,
    chosen,
    facts_of,
    token_tensors,
    torch_for,
)
from trainer_client.collate.named import Fill, Kind, kinds_of, named_tensors

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch(Collated):
    """Batch in the packed layout: B samples end to end in N tokens, ΣT and `pad_tokens` behind them."""

    token_ids: "Tensor"
    """Token ids, int64 [N]."""
    position_ids: "Tensor"
    """Positions, int64 [N], from 0 at each segment's first token."""
    loss_mask: "Tensor"
    """Loss mask, bool [N]: True where the token counts in the loss."""
    logprobs: "Tensor"
    """Log-probabilities under the behaviour policy, float32 [N]; entry t belongs to token t."""
    versions: "Tensor"
    """Weight version that generated each token, int64 [N]; −1 for prompt and padding."""
    segment_ids: "Tensor"
    """Index of the sample that a token belongs to, int64 [N], 0 to B − 1; −1 for padding."""
    cu_seqlens: "Tensor"
    """Boundaries of the samples, int32 [B + 1]: each one's first token, and the end. With padding [B + 2], its segment
    last."""
    max_seqlen: int
    """Length of the longest segment in tokens."""
    pad_tokens: int
    """Length of the padding segment in tokens."""
    advantages: "Tensor | None" = None
    """Advantages, float32 [N]; None unless given. One given per sample stands at each of its loss tokens."""


def pack(  # noqa: PLR0913 - options of one layout
    batch: Batch,
    *,
    groups: Sequence[Group] | None = None,
    rows: bool = False,
    pad_token_id: int = 0,
    multiple_of: int = 1,
    advantages: Advantages | None = None,
    extras: Extras = (),
    extras_fill: Fill = 0,
    pin_memory: bool = False,
) -> PackedBatch:
    """Pack the samples of `groups` (default: all of the batch), group after group, end to end.

    `rows`: as of `collate`. N is rounded up to a multiple of `multiple_of`. `advantages`: float [B], or B arrays of
    [T]. `extras`: further columns by name, per token [N, …] with `extras_fill` at padding, per sample [B, …], ragged as
    `Ragged`. `pin_memory`: make the tensors in page-locked memory.

    Raises as `collate` does.
    """
    torch_for("collate")
    layout = PackedLayout(pad_token_id, multiple_of, extras_fill, pin_memory)
    of = chosen(batch, groups, advantages, rows=rows)
    return layout.of(of, kinds_of(of.groups, extras))


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Options of the packed layout, applied by `of`. Raises InvalidField for an option out of range."""

    pad_token_id: int
    multiple_of: int
    extras_fill: Fill
    pin_memory: bool

    def __post_init__(self) -> None:
        at_least_one("multiple_of", self.multiple_of)

    def of(self, chosen: Chosen, kinds: dict[str, Kind]) -> PackedBatch:
        """Make the batch of the chosen samples."""
        torch = torch_for("collate")
        lengths = chosen.lengths
        ends = list(accumulate(lengths, initial=0))
        pad_tokens = -ends[-1] % self.multiple_of
        shape = (ends[-1] + pad_tokens,)
        rows: list[Row] = [slice(start, end) for start, end in pairwise(ends)]
        pin = self.pin_memory
        tokens = token_tensors(chosen, shape, rows, pad_token_id=self.pad_token_id, pin=pin)
        segment_ids = torch.full(shape, -1, dtype=torch.int64, pin_memory=pin)
        segments = segment_ids.numpy()
        for i, row in enumerate(rows):
            segments[row] = i
        if pad_tokens:
            tokens["position_ids"].numpy()[ends[-1] :] = np.arange(pad_tokens)
            ends.append(shape[0])
        return PackedBatch(
            **facts_of(chosen, pin=pin),  # type: ignore[arg-type]
            **tokens,  # type: ignore[arg-type]
            segment_ids=segment_ids,
            cu_seqlens=torch.tensor(ends, dtype=torch.int32, pin_memory=pin),
            max_seqlen=max(pad_tokens, *lengths, 0),
            pad_tokens=pad_tokens,
            extras=named_tensors(chosen, kinds, shape, rows, fill=self.extras_fill, pin=pin),
        )
