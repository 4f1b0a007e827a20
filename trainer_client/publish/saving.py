"""Saving of tensors as safetensors files, one after another as they come: the model is never in memory as a whole.

The format (https://github.com/huggingface/safetensors#format): 8 bytes little-endian length n; n bytes of JSON {name:
{dtype, shape, data_offsets}}, padded with spaces to a multiple of 8; data. A model of several files has an index,
{"metadata": {"total_size"}, "weight_map": {name: file}}, under the names that transformers gives them.

Invariants: every tensor is written whole, also those that share memory. Within a file wider types come first, so that
every tensor is aligned to its type.
"""

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from buffer_wire.errors import InvalidField
from trainer_client.publish.collective.plan import TensorSpec
from trainer_client.publish.named_tensors import NamedTensors, announced, size_of, specs_of

if TYPE_CHECKING:
    from torch import Tensor

FILE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_FILE_BYTES = 5_000_000_000
"""Limit on bytes of tensors in one file, unless a single one is larger; transformers' `max_shard_size`."""

_ALIGNMENT = 8
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Names of dtypes in safetensors, by torch's names."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Layout of one file: its header, and the place of each tensor's data."""

    name: str
    header: bytes
    starts: tuple[int, ...]
    """First byte of each tensor in the file, in the order in which the tensors come."""


def save_tensors(
    tensors: NamedTensors,
    directory: Path,
    *,
    specs: Sequence[TensorSpec] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write tensors into `directory`: as model.safetensors, or as several files and an index above `max_file_bytes`.

    `specs`: the tensors' specs, where they are known; else the tensors are gone through once more. Raises InvalidField
    for anything but a plain tensor, or a dtype that safetensors does not have; OSError.
    """
    if specs is None:
        specs, _ = specs_of(tensors)
    files = _split(specs, max_file_bytes)
    layouts = [_layout_of(_file_name(at, len(files)), file) for at, file in enumerate(files)]
    _write(announced(tensors, specs), layouts, directory)
    if len(layouts) > 1:
        weight_map = {spec.name: layout.name for layout, file in zip(layouts, files, strict=True) for spec in file}
        index = {"metadata": {"total_size": sum(map(size_of, specs))}, "weight_map": weight_map}
        (directory / INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _split(specs: Sequence[TensorSpec], max_file_bytes: int) -> list[list[TensorSpec]]:
    """Split the tensors into files, in their order."""
    files: list[list[TensorSpec]] = [[]]
    used = 0
    for spec in specs:
        size = size_of(spec)
        if files[-1] and used + size > max_file_bytes:
            files.append([])
            used = 0
        files[-1].append(spec)
        used += size
    return files


def _file_name(at: int, count: int) -> str:
    return FILE_NAME if count == 1 else f"model-{at + 1:05d}-of-{count:05d}.safetensors"


def _layout_of(name: str, specs: Sequence[TensorSpec]) -> _Layout:
    offsets: dict[str, tuple[int, int]] = {}
    end = 0
    for spec in sorted(specs, key=lambda spec: -_width(spec)):
        offsets[spec.name] = (end, end + size_of(spec))
        end += size_of(spec)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for spec in sorted(specs, key=lambda spec: offsets[spec.name]):
        header[spec.name] = {"dtype": _dtype(spec), "shape": spec.shape, "data_offsets": offsets[spec.name]}
    raw = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % _ALIGNMENT)
    start = _ALIGNMENT + len(raw)
    return _Layout(name, struct.pack("<Q", len(raw)) + raw, tuple(start + offsets[spec.name][0] for spec in specs))


def _dtype(spec: TensorSpec) -> str:
    if spec.dtype not in _DTYPES:
        raise InvalidField(f"source[{spec.name!r}].dtype", spec.dtype, "one of " + ", ".join(_DTYPES))
    return _DTYPES[spec.dtype]


def _width(spec: TensorSpec) -> int:
    return size_of(TensorSpec(spec.name, spec.dtype, ()))


def _write(tensors: "Iterator[Tensor]", layouts: Sequence[_Layout], directory: Path) -> None:
    for layout in layouts:
        with (directory / layout.name).open("wb") as file:
            file.write(layout.header)
            for start in layout.starts:
                file.seek(start)
                # No name is left on the tensor: it goes before the next one is gathered.
                _write_one(next(tensors), file)
    # Whoever gives more than was announced is told so there.
    next(tensors, None)


def _write_one(tensor: "Tensor", file: BinaryIO) -> None:
    import torch

    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    file.write(values.numpy().data)
