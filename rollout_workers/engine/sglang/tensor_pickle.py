"""Tensors as SGLang takes them by value: a flattened bucket, written here without torch.

The bucket is a pickled mapping of two. `flattened_tensor` is one tensor of bytes with the values of all; `metadata`
has each tensor's name, type, shape and place in it. SGLang makes views of it (FlattenedTensorBucket): one storage is
read in place of one a tensor.

The stream is what `pickle.dumps` makes of such a mapping: `_rebuild_tensor_v2` over a storage that `torch.save` has
written, which in turn is an uncompressed zip of a small pickle and the raw values. Both have been stable since torch
1.6, and SGLang's restricted unpickler lets exactly these names pass. Nothing is shared with the reader: tensors that
travel by torch's file descriptors end an SGLang server.

Only ever sent from a worker to its own engine on the same machine; nothing here is read back.
"""

import io
import struct
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""torch's name of a type, by safetensors'."""
_ALIGNED_BYTES = 8
"""Places in the bucket are multiples of it: a view of a type begins at a multiple of its size."""


@dataclass(frozen=True, slots=True)
class NamedValues:
    """Tensor with its values, little-endian, the last dimension running fastest."""

    name: str
    dtype: str
    """A key of DTYPES."""
    shape: tuple[int, ...]
    values: bytes


def pickled(tensors: Iterable[NamedValues]) -> bytes:
    """A pickle of the bucket with these tensors. All of them together below 4 GiB."""
    parts: list[bytes] = []
    metadata: list[bytes] = []
    at = 0
    for tensor in tensors:
        parts.append(bytes(-at % _ALIGNED_BYTES))
        at += len(parts[-1])
        metadata.append(_metadata(tensor, at))
        parts.append(tensor.values)
        at += len(tensor.values)
    entries = [_text("flattened_tensor"), *_bytes_tensor(parts, at), _text("metadata"), b"](", *metadata, b"e"]
    return b"".join([b"\x80\x03}(", *entries, b"u."])  # PROTO 3, EMPTY_DICT, MARK ... SETITEMS, STOP


def _metadata(tensor: NamedValues, start: int) -> bytes:
    """A namespace with the fields of SGLang's FlattenedTensorMetadata."""
    fields = {
        "name": _text(tensor.name),
        "shape": _numbers(tensor.shape),
        "dtype": f"ctorch\n{DTYPES[tensor.dtype]}\n".encode(),
        "start_idx": _number(start),
        "end_idx": _number(start + len(tensor.values)),
        "numel": _number(len(tensor.values)),
    }
    state = b"}(" + b"".join(_text(name) + value for name, value in fields.items()) + b"u"
    return b"ctypes\nSimpleNamespace\n)R" + state + b"b"  # EMPTY_TUPLE, REDUCE ... BUILD


def _bytes_tensor(parts: Iterable[bytes], size: int) -> Iterator[bytes | memoryview]:
    """_rebuild_tensor_v2(storage, storage_offset, size, stride, requires_grad, backward_hooks), of uint8 [size]."""
    saved = _saved_storage(parts, size)
    yield b"ctorch._utils\n_rebuild_tensor_v2\n(ctorch.storage\n_load_from_bytes\nB" + struct.pack("<I", len(saved))
    yield saved
    yield b"\x85R" + _number(0) + _numbers((size,)) + _numbers((1,))
    yield b"\x89ccollections\nOrderedDict\n)RtR"  # NEWFALSE ... EMPTY_TUPLE, REDUCE, TUPLE, REDUCE


def _saved_storage(parts: Iterable[bytes], size: int) -> memoryview:
    """Storage as torch.save writes it, with ("storage", class, key, location, values) as its persistent id."""
    identity = _text("storage") + b"ctorch\nByteStorage\n" + _text("0") + _text("cpu") + _number(size)
    saved = io.BytesIO()
    with zipfile.ZipFile(saved, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02(" + identity + b"tQ.")  # PROTO 2 ... TUPLE, BINPERSID, STOP
        archive.writestr("archive/byteorder", b"little")
        with archive.open("archive/data/0", "w") as values:
            for part in parts:
                values.write(part)
        archive.writestr("archive/version", b"3\n")
    return saved.getbuffer()


def _text(text: str) -> bytes:
    raw = text.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def _number(number: int) -> bytes:
    if number < 1 << 31:
        return b"J" + struct.pack("<i", number)
    return b"\x8a\x08" + struct.pack("<q", number)  # LONG1


def _numbers(numbers: Sequence[int]) -> bytes:
    return b"(" + b"".join(_number(n) for n in numbers) + b"t"
