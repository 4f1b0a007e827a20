"""Copy of the weights of one version, kept in main memory beside the model, to be broadcast once more.

Invariant: a copy that names a version is whole, and nothing changes it before the next version is sent.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer_client.publish.named_tensors import NamedTensors

if TYPE_CHECKING:
    from torch import Tensor


class KeptCopy:
    """Copy of a version's tensors, made while they are sent, into the memory of the previous copy."""

    def __init__(self) -> None:
        self.version: int | None = None
        """Version of the weights; None while there are none, or a part of them is of another version."""
        self._tensors: dict[str, Tensor] = {}

    def copying(self, tensors: NamedTensors) -> NamedTensors:
        """Wrap the tensors so that a complete pass over them leaves a copy behind. The caller then sets its version."""

        def copied() -> Iterator[tuple[str, "Tensor"]]:
            kept, self._tensors = self._tensors, {}
            self.version = None
            for name, tensor in tensors():
                self._tensors[name] = _copied(tensor, kept.pop(name, None))
                yield name, tensor

        return copied

    def tensors(self) -> Iterator[tuple[str, "Tensor"]]:
        """Yield the names and tensors, in the order in which they were sent."""
        yield from self._tensors.items()


def _copied(tensor: "Tensor", into: "Tensor | None") -> "Tensor":
    """Copy a tensor to the CPU, contiguous; reuses `into` where it fits."""
    import torch

    source = tensor.detach()
    if into is None or into.shape != source.shape or into.dtype != source.dtype:
        into = torch.empty(source.shape, dtype=source.dtype, device="cpu")
    return into.copy_(source)
