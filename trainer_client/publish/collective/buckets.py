"""Buckets of a collective update: successive tensors of one dtype, whose bytes are sent as one tensor.

A broadcast of a small tensor costs the time of a larger one. An engine has all that one request brings in memory,
beside its model. Buckets bound both. A receiver cuts a bucket by the announced specs alone, so it has no gaps; with one
dtype each tensor in it begins at a multiple of its item size, as views need.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from trainer_client.publish.collective.plan import TensorSpec
from trainer_client.publish.named_tensors import size_of

if TYPE_CHECKING:
    from torch import Tensor


def bucket_counts(specs: Sequence[TensorSpec], most_bytes: int) -> tuple[int, ...]:
    """Count the tensors of each bucket, in order: at most `most_bytes`, or one larger tensor alone."""
    counts: list[int] = []
    filled = 0
    for i, spec in enumerate(specs):
        added = size_of(spec)
        if counts and spec.dtype == specs[i - 1].dtype and filled + added <= most_bytes:
            counts[-1] += 1
            filled += added
        else:
            counts.append(1)
            filled = added
    return tuple(counts)


def packed(tensors: Iterator["Tensor"], counts: Sequence[int]) -> Iterator["Tensor"]:
    """Yield the buckets of contiguous tensors, each uint8 [bytes]. Raises what `tensors` raises, to its very end."""
    for count in counts:
        yield _joined([_bytes_of(tensor) for tensor in islice(tensors, count)])
    next(tensors, None)


def _joined(parts: "list[Tensor]") -> "Tensor":
    import torch

    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _bytes_of(tensor: "Tensor") -> "Tensor":
    import torch

    return tensor.flatten().view(torch.uint8)
