"""Padded layout: samples as rows of a rectangle, [B, T], filled up on one side."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from buffer_wire.errors import InvalidField
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

PadSide: TypeAlias = Literal["right", "left"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedBatch(Collated):
    """Batch in the padded layout: B samples, padded to T tokens."""

    token_ids: "Tensor"
    """Token ids, int64 [B, T]."""
    position_ids: "Tensor"
    """Positions, int64 [B, T], from 0 at each sample's first token, on whichever side the padding is; 0 at padding."""
    attention_mask: "Tensor"
    """Attention mask, bool [B, T]: True where there is a token."""
    loss_mask: "Tensor"
    """Loss mask, bool [B, T]: True where the token counts in the loss."""
    logprobs: "Tensor"
    """Log-probabilities under the behaviour policy, float32 [B, T]; entry t belongs to token t."""
    versions: "Tensor"
    """Weight version that generated each token, int64 [B, T]; −1 for prompt and padding."""
    advantages: "Tensor | None" = None
    """Advantages, float32 [B, T]; None unless given. One given per sample stands at each of its loss tokens."""


def collate(  # noqa: PLR0913 - options of one layout
    batch: Batch,
    *,
    groups: Sequence[Group] | None = None,
    rows: bool = False,
    pad_token_id: int = 0,
    pad_side: PadSide = "right",
    multiple_of: int = 1,
    advantages: Advantages | None = None,
    extras: Extras = (),
    extras_fill: Fill = 0,
    pin_memory: bool = False,
) -> PaddedBatch:
    """Pad the samples of `groups` (default: all of the batch), group after group, to the longest of them.

    `rows`: samples may be rows of trajectories; those that are not trainable are left out. T is rounded up to a
    multiple of `multiple_of`. `advantages`: float [B], or B arrays of [T]. `extras`: further columns by name, per token
    [B, T, …] with `extras_fill` at padding, per sample [B, …], ragged as `Ragged`. `pin_memory`: make the tensors in
    page-locked memory.

    Raises InvalidField for an option out of range, and for rows of trajectories without `rows`. Raises ImportError when
    torch is not installed, and torch's RuntimeError for `pin_memory` on a machine without CUDA.
    """
    torch_for("collate")
    layout = PaddedLayout(pad_token_id, pad_side, multiple_of, extras_fill, pin_memory)
    of = chosen(batch, groups, advantages, rows=rows)
    return layout.of(of, kinds_of(of.groups, extras))


@dataclass(frozen=True, slots=True)
class PaddedLayout:
    """Options of the padded layout, applied by `of`. Raises InvalidField for an option out of range."""

    pad_token_id: int
    pad_side: PadSide
    multiple_of: int
    extras_fill: Fill
    pin_memory: bool

    def __post_init__(self) -> None:
        at_least_one("multiple_of", self.multiple_of)
        if self.pad_side not in ("right", "left"):
            raise InvalidField("pad_side", self.pad_side, "'right' or 'left'")

    def of(self, chosen: Chosen, kinds: dict[str, Kind]) -> PaddedBatch:
        """Make the batch of the chosen samples."""
        torch = torch_for("collate")
        lengths = chosen.lengths
        width = -(-max(lengths, default=0) // self.multiple_of) * self.multiple_of
        shape = (len(lengths), width)
        starts = [width - length if self.pad_side == "left" else 0 for length in lengths]
        rows: list[Row] = [
            (i, slice(start, start + length)) for i, (start, length) in enumerate(zip(starts, lengths, strict=True))
        ]
        pin = self.pin_memory
        attention_mask = torch.zeros(shape, dtype=torch.bool, pin_memory=pin)
        there = attention_mask.numpy()
        for row in rows:
            there[row] = True
        return PaddedBatch(
            **facts_of(chosen, pin=pin),  # type: ignore[arg-type]
            **token_tensors(chosen, shape, rows, pad_token_id=self.pad_token_id, pin=pin),  # type: ignore[arg-type]
            attention_mask=attention_mask,
            extras=named_tensors(chosen, kinds, shape, rows, fill=self.extras_fill, pin=pin),
        )
