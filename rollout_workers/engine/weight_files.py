"""Checks a directory of safetensors before an engine is told to load it.

SGLang's update from disk trusts its files more than it should:
- a file that is cut short, or a tensor of another shape, ends the server process: the loader raises, the announced
  rollback reads the same bad file again and raises in the scheduler's loop;
- a tensor that is missing is no error: the old values stay, and the engine generates with a mixture of two versions.

Both show in the headers of the files, which cost a few KB to read. The format: 8 bytes little-endian length n, n bytes
of JSON {name: {dtype, shape, data_offsets}}, data (https://github.com/huggingface/safetensors#format).
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Layout = Mapping[str, tuple[int, ...]]
"""Shape of every tensor of a model, by name."""

INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own bound


class UnloadableWeights(ValueError):
    """The files are not complete, or not of the model that the engine serves."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Location of one tensor's values in a file."""

    name: str
    dtype: str
    """Type of the values: safetensors' name, as in "BF16"."""
    shape: tuple[int, ...]
    file: Path
    start: int
    """Place of the first byte in the file."""
    end: int
    """Place of the byte after the last one."""

    @property
    def size_bytes(self) -> int:
        """Size of the tensor's values in bytes."""
        return self.end - self.start

    def read(self) -> bytes:
        """Values, little-endian, the last dimension running fastest. Blocking. Raises UnloadableWeights."""
        with self.file.open("rb") as stream:
            stream.seek(self.start)
            values = stream.read(self.size_bytes)
        if len(values) != self.size_bytes:
            raise UnloadableWeights(f"{self.file} became shorter while it was read")
        return values


def read_layout(directory: Path) -> Layout:
    """Shapes of all tensors in the model at `directory`. Raises UnloadableWeights."""
    return {tensor.name: tensor.shape for tensor in read_headers(directory)}


def read_headers(directory: Path) -> list[StoredTensor]:
    """Tensors of the model at `directory`, without their values. Raises UnloadableWeights."""
    try:
        tensors: dict[str, StoredTensor] = {}
        for file in _weight_files(directory):
            tensors.update((tensor.name, tensor) for tensor in _read_header(file))
    except OSError as error:
        raise UnloadableWeights(f"{error.filename or directory}: {error.strerror or error}") from error
    return list(tensors.values())


def check_same_model(new: Layout, served: Layout) -> None:
    """Raise UnloadableWeights unless `new` has every tensor of `served` in its shape, and no more layers or experts.

    Other further tensors are allowed: a tied output layer may be written out, and the engine skips what it does not
    know. It would skip layers too, and serve the lower half of a larger model under its name.
    """
    missing = sorted(served.keys() - new.keys())
    if missing:
        raise UnloadableWeights(f"{len(missing)} tensors are missing, the first is {missing[0]}")
    for name, shape in served.items():
        if new[name] != shape:
            raise UnloadableWeights(f"{name} has shape {list(new[name])}, the engine's model has {list(shape)}")
    known = {part for name in served for part in _numbered(name)}
    lists = {part.rpartition(".")[0] for part in known}
    for name in sorted(new.keys() - served.keys()):
        for part in _numbered(name):
            if part not in known and part.rpartition(".")[0] in lists:
                raise UnloadableWeights(f"{name} is not in the engine's model, which has no {part}: a larger model's")


def _numbered(name: str) -> list[str]:
    """Members of lists that a tensor is part of: for `layers.3.experts.7.w` `layers.3` and `layers.3.experts.7`."""
    parts = name.split(".")
    return [".".join(parts[: at + 1]) for at, part in enumerate(parts) if part.isdecimal()]


def _weight_files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise UnloadableWeights(f"{directory} is not a directory")
    index = directory / INDEX_FILE
    if index.is_file():
        try:
            names = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise UnloadableWeights(f"{index} cannot be read: {error}") from error
        return sorted(directory / name for name in names)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UnloadableWeights(f"{directory} holds no .safetensors file")
    return files


def _read_header(file: Path) -> list[StoredTensor]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES + 1
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise UnloadableWeights(f"{file} is cut short or is no safetensors file ({size} bytes)")
        raw = stream.read(length)
    try:
        header: dict[str, Any] = json.loads(raw)
        header.pop("__metadata__", None)
        data = 8 + length
        tensors = [
            StoredTensor(
                name,
                str(entry["dtype"]),
                tuple(int(n) for n in entry["shape"]),
                file,
                data + int(entry["data_offsets"][0]),
                data + int(entry["data_offsets"][1]),
            )
            for name, entry in header.items()
        ]
    except (ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
        raise UnloadableWeights(f"{file} has an unreadable header: {error}") from error
    end = max((tensor.end for tensor in tensors), default=data)
    if size != end:
        raise UnloadableWeights(f"{file} has {size} bytes, its header promises {end}")
    return tensors
