"""Tensors as a safetensors file."""

from pathlib import Path
from typing import TYPE_CHECKING

from trainer_client.publish.named_tensors import NamedTensors

if TYPE_CHECKING:
    from torch import Tensor

FILE_NAME = "model.safetensors"


def save_tensors(tensors: NamedTensors, directory: Path) -> None:
    """Write them all into `directory`/model.safetensors, each whole, also those that share memory."""
    from safetensors.torch import save_file

    own: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors():
        plain = tensor.detach().cpu().contiguous()
        at = plain.untyped_storage().data_ptr()
        own[name] = plain.clone() if at in seen else plain
        seen.add(at)
    save_file(own, directory / FILE_NAME, metadata={"format": "pt"})
