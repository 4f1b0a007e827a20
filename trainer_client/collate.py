"""A batch, or some of its groups, as padded torch tensors.

Invariants: every tensor of shape [B, T] is zero at padding (versions −1 there), so that a mask is the only thing that
a loss needs; the step's totals travel along, so that token-mean losses over shards and micro-batches add up to the
single-process value:

    loss = (per_token_loss * batch.loss_mask).sum() / batch.total_loss_tokens

Of a round that is not `final` they are only those so far: sum there, and divide the gradients when the last one is in.

Needs torch (`pip install rollout-buffer[torch]`), which is imported when `collate` is called.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
import numpy.typing as npt

from buffer_wire.errors import InvalidField
from trainer_client.batch import Batch, Group, Sample

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedBatch:
    """B samples, padded to T tokens."""

    token_ids: "Tensor"
    """int64 [B, T]"""
    attention_mask: "Tensor"
    """bool [B, T], True where there is a token."""
    loss_mask: "Tensor"
    """bool [B, T], True where the token counts in the loss."""
    logprobs: "Tensor"
    """float32 [B, T] of the behaviour policy; entry t belongs to token t."""
    versions: "Tensor"
    """int64 [B, T], the weight version behind each token; −1 for prompt and padding."""
    rewards: "Tensor"
    """float32 [B]"""
    group_index: "Tensor"
    """int64 [B], which of the collated groups a sample belongs to, from 0."""
    prompt_len: "Tensor"
    """int64 [B]"""
    lengths: "Tensor"
    """int64 [B], tokens of prompt and response."""
    staleness: "Tensor"
    """int64 [B], of the sample's group in versions."""
    step: int
    train_version: int
    total_groups: int
    """Of the step over all ranks and up to this round, as are the totals below."""
    total_samples: int
    total_tokens: int
    total_loss_tokens: int
    final: bool = True
    """True when the totals are the step's own."""

    def to(self, device: "torch.device | str", *, non_blocking: bool = False) -> Self:
        """The same batch with its tensors on `device`."""
        moved = {
            field.name: value.to(device, non_blocking=non_blocking)
            for field in fields(self)
            if hasattr(value := getattr(self, field.name), "to")
        }
        return replace(self, **moved)


def collate(
    batch: Batch,
    *,
    groups: Sequence[Group] | None = None,
    pad_token_id: int = 0,
    pad_side: Literal["right", "left"] = "right",
    multiple_of: int = 1,
) -> PaddedBatch:
    """Pad the samples of `groups` (default: all of the batch), group after group, to the longest of them.

    T is rounded up to a multiple of `multiple_of`. Raises InvalidField for an option out of range, and ImportError when
    torch is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            "trainer_client.collate needs torch, which is not installed: pip install 'rollout-buffer[torch]'"
        ) from error
    if multiple_of < 1:
        raise InvalidField("multiple_of", multiple_of, "at least 1")
    if pad_side not in ("right", "left"):
        raise InvalidField("pad_side", pad_side, "'right' or 'left'")
    chosen = batch.groups if groups is None else groups
    samples = [sample for group in chosen for sample in group.samples]
    lengths = np.array([sample.tokens for sample in samples], np.int64)
    width = -(-int(lengths.max(initial=0)) // multiple_of) * multiple_of
    arrays = _padded(samples, width, pad_token_id, left=pad_side == "left")
    sizes = [len(group.samples) for group in chosen]
    info = batch.info
    return PaddedBatch(
        **{name: torch.from_numpy(array) for name, array in arrays.items()},
        rewards=torch.tensor([sample.reward for sample in samples], dtype=torch.float32),
        group_index=torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes)),
        prompt_len=torch.tensor([sample.prompt_len for sample in samples], dtype=torch.int64),
        lengths=torch.from_numpy(lengths),
        staleness=torch.from_numpy(np.repeat(np.array([g.staleness for g in chosen], np.int64), sizes)),
        step=info.step,
        train_version=info.train_version,
        total_groups=info.total_groups,
        total_samples=info.total_samples,
        total_tokens=info.total_tokens,
        total_loss_tokens=info.total_loss_tokens,
        final=info.final,
    )


def _padded(
    samples: Sequence[Sample], width: int, pad_token_id: int, *, left: bool
) -> dict[str, npt.NDArray[np.generic]]:
    shape = (len(samples), width)
    token_ids = np.full(shape, pad_token_id, np.int64)
    attention_mask = np.zeros(shape, np.bool_)
    loss_mask = np.zeros(shape, np.bool_)
    logprobs = np.zeros(shape, np.float32)
    versions = np.full(shape, -1, np.int64)
    for i, sample in enumerate(samples):
        start = width - sample.tokens if left else 0
        row = slice(start, start + sample.tokens)
        token_ids[i, row] = sample.token_ids
        attention_mask[i, row] = True
        loss_mask[i, row] = sample.loss_mask
        logprobs[i, row] = sample.logprobs
        versions[i, row] = sample.versions
    return {
        "token_ids": token_ids,
        "attention_mask": attention_mask,
        "loss_mask": loss_mask,
        "logprobs": logprobs,
        "versions": versions,
    }
