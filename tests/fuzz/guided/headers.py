"""Headers of weight files: what the worker reads of safetensors, and of their index, before an engine is told to load.

The first byte says what the rest is, modulo 4: a header, which is given its length and its values; the same with values
that are cut short by one byte; an index beside two files; a file as it is. The safetensors library has the last word:
no file that it refuses may be taken.
"""

import json
import shutil
import tempfile
from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rollout_workers.engine.weight_files import INDEX_FILE, StoredTensor, UnloadableWeights, read_headers
from tests.fuzz.guided.promises import said_in_short

HEADER, SHORT, INDEX, FILE = b"\0", b"\1", b"\2", b"\3"
MOST_VALUES = 4_096
_PLACE = Path(tempfile.mkdtemp(prefix="fuzz-headers-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
_PLAIN = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"BF16","shape":[],"data_offsets":[8,10]}}'
SEEDS = (
    HEADER + _PLAIN,
    HEADER + b'{"__metadata__":{"format":"pt"},"w":{"dtype":"U8","shape":[2,0,3],"data_offsets":[0,0]}}',
    SHORT + _PLAIN,
    INDEX + b'{"metadata":{"total_size":10},"weight_map":{"a":"one.safetensors","b":"two.safetensors"}}',
    FILE + len(_PLAIN).to_bytes(8, "little") + _PLAIN + bytes(10),
)


def one(data: bytes) -> None:
    """A directory is refused by name, or each tensor lies within its file, apart from the others, in its size."""
    place = _PLACE / "weights"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    (_PLACE / "outside.safetensors").write_bytes(_file(_PLAIN, 10))
    kind, content = (data[:1] or b"\0")[0] % 4, data[1:]
    if kind == INDEX[0]:
        (place / INDEX_FILE).write_bytes(content)
        for name in ("one", "two"):
            (place / f"{name}.safetensors").write_bytes(_file(_PLAIN, 10))
    elif kind == FILE[0]:
        (place / "one.safetensors").write_bytes(content)
    else:
        (place / "one.safetensors").write_bytes(_file(content, _values(content) - (kind == SHORT[0])))
    try:
        tensors = read_headers(place)
    except UnloadableWeights as error:
        said_in_short(str(error))
        return
    _check(place, tensors)


def _file(header: bytes, values: int) -> bytes:
    return len(header).to_bytes(8, "little") + header + bytes(max(values, 0))


def _values(header: bytes) -> int:
    """Bytes of values that a header promises, as far as it can be read."""
    try:
        entries = json.loads(header).values()
        return min(max(int(entry["data_offsets"][1]) for entry in entries if "data_offsets" in entry), MOST_VALUES)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError, OverflowError):
        return 0


def _check(place: Path, tensors: list[StoredTensor]) -> None:
    for tensor in tensors:
        assert tensor.file.parent == place, f"{tensor.file} is elsewhere"
        assert all(n >= 0 for n in tensor.shape), tensor
        assert len(tensor.read()) == tensor.size_bytes, tensor
    for file in {tensor.file for tensor in tensors}:
        try:
            with safe_open(file, "numpy") as found:
                names = set(found.keys())
                for name in names:
                    assert prod(found.get_slice(name).get_shape()) >= 0
        except SafetensorError as error:
            raise AssertionError(f"taken, although safetensors says: {error}") from error
        ours = {tensor.name: tensor.shape for tensor in tensors if tensor.file == file}
        assert ours.keys() <= names, f"{ours.keys() - names} are not there"
