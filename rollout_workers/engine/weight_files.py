"""Checks a directory of safetensors before an engine is told to load it.

SGLang's update from disk trusts its files more than it should:
- a file that is cut short, or a tensor of another shape, ends the server process: the loader raises, the announced
  rollback reads the same bad file again and raises in the scheduler's loop;
- a tensor that is missing is no error: the old values stay, and the engine generates with a mixture of two versions.

Both show in the headers of the files, which cost a few KB to read. The format: 8 bytes little-endian length n, n bytes
of JSON {name: {dtype, shape, data_offsets}}, data (https://github.com/huggingface/safetensors#format).

Invariants: nothing outside of the directory is read, whatever an index names. What the safetensors library refuses is
refused here, by name and before any value is read: tensors tile the values, each in the size of its type and shape.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

from buffer_wire.limits import is_file_name, is_text

Layout = Mapping[str, tuple[int, ...]]
"""Shape of every tensor of a model, by name."""

INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 32_000_000
"""Largest header of a file, and largest index: 250,000 tensors. What is read takes up to thirty times as much memory,
for which the format's own bound, 100 MB, would be too much.
"""
MAX_NAME_CHARS = 1_024
"""Longest name of a tensor: it is taken apart by its dots."""
MAX_DIMENSIONS = 64
_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""Bits of a value of each type that safetensors has."""
_SHOWN = 120
"""Characters that are said of what a file gives as a name or a value."""


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


def read_object(path: Path) -> dict[str, Any]:
    """JSON object of a small file. Blocking. Raises UnloadableWeights, OSError."""
    size = path.stat().st_size
    if size > MAX_HEADER_BYTES:
        raise UnloadableWeights(f"{path} has {size} bytes; at most {MAX_HEADER_BYTES} are read")
    return _object(path.read_bytes(), f"{path} cannot be read")


def _object(raw: bytes, refusal: str) -> dict[str, Any]:
    """JSON object as the safetensors library reads it, which knows neither NaN nor names that are given twice."""
    try:
        found = json.loads(raw.decode(), parse_constant=_no_number, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise UnloadableWeights(f"{refusal}: {error}") from None
    if not isinstance(found, dict):
        raise UnloadableWeights(f"{refusal}: it is no JSON object")
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is given twice")
    return found


def _weight_files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise UnloadableWeights(f"{directory} is not a directory")
    index = directory / INDEX_FILE
    if index.is_file():
        names = read_object(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise UnloadableWeights(f"{index} has no weight_map, or an empty one")
        for name in names.values():
            if not isinstance(name, str) or not is_file_name(name) or not is_text(name):
                raise UnloadableWeights(f"{index} names {_shown(name)}: no relative path without '..'")
        return sorted({directory / name for name in names.values()})
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UnloadableWeights(f"{directory} holds no .safetensors file")
    return files


def _read_header(file: Path) -> list[StoredTensor]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > size - 8:
            raise UnloadableWeights(f"{file} is cut short or is no safetensors file ({size} bytes)")
        if length > MAX_HEADER_BYTES:
            raise UnloadableWeights(f"{file} has a header of {length} bytes; at most {MAX_HEADER_BYTES} are read")
        header = _object(stream.read(length), f"{file} has an unreadable header")
    about = header.pop("__metadata__", None)
    if about is not None and not _are_texts(about):
        raise UnloadableWeights(f"{file} has a __metadata__ that is no map of texts")
    tensors = [_tensor(file, 8 + length, name, entry) for name, entry in header.items()]
    end = 8 + length
    for tensor in sorted(tensors, key=attrgetter("start", "end")):
        if tensor.start != end:
            where = f"at byte {tensor.start} and not at {end}, where the values before it end"
            raise UnloadableWeights(f"{file}: {tensor.name} begins {where}")
        end = tensor.end
    if size != end:
        raise UnloadableWeights(f"{file} has {size} bytes, its header promises {end}")
    return tensors


def _tensor(file: Path, data: int, name: str, entry: Any) -> StoredTensor:  # noqa: ANN401 - JSON
    """Tensor of an entry of a header. `data`: the place of the first value in the file."""
    if len(name) > MAX_NAME_CHARS or not is_text(name):
        raise UnloadableWeights(f"{file} names a tensor {_shown(name)}: no text of at most {MAX_NAME_CHARS} characters")
    parts: list[Any] = [entry.get(key) if isinstance(entry, dict) else None for key in _ENTRY]
    dtype, shape, offsets = parts
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise UnloadableWeights(f"{file}: {name} has dtype {_shown(dtype)}, which safetensors does not know")
    if not _are_counts(shape) or len(shape) > MAX_DIMENSIONS:
        raise UnloadableWeights(f"{file}: {name} has shape {_shown(shape)}, no list of at most {MAX_DIMENSIONS} counts")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise UnloadableWeights(f"{file}: {name} has data_offsets {_shown(offsets)}, no two counts")
    begin, end = offsets
    if (end - begin) * 8 != prod(shape) * _BITS[dtype]:
        raise UnloadableWeights(f"{file}: {name} has {end - begin} bytes for {dtype} {_shown(shape)}")
    return StoredTensor(name, dtype, tuple(shape), file, data + begin, data + end)


_ENTRY = ("dtype", "shape", "data_offsets")


def _are_counts(values: Any) -> bool:  # noqa: ANN401 - JSON
    """True for a list of integers from 0 that 64 bits hold."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 64 for value in values)


def _are_texts(about: Any) -> bool:  # noqa: ANN401 - JSON
    """True for an object whose names and values are texts."""
    return isinstance(about, dict) and all(
        isinstance(text, str) and is_text(name + text) for name, text in about.items()
    )


def _shown(value: object) -> str:
    """Representation of what a file says, in part where it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
