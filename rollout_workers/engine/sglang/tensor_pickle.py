"""Tensors as SGLang takes them by value: a pickled list of (name, torch.Tensor), written here without torch.

The stream is what `pickle.dumps` makes of such a list: `_rebuild_tensor_v2` over a storage that `torch.save` has
written, which in turn is an uncompressed zip of a small pickle and the raw values. Both have been stable since torch
1.6, and SGLang's restricted unpickler lets exactly these names pass. Nothing is shared with the reader: tensors that
travel by torch's file descriptors end an SGLang server.

Only ever sent from a worker to its own engine on the same machine; nothing here is read back.
"""

import io
import struct
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

STORAGES = {
    "F64": ("DoubleStorage", 8),
    "F32": ("FloatStorage", 4),
    "F16": ("HalfStorage", 2),
    "BF16": ("BFloat16Storage", 2),
    "I64": ("LongStorage", 8),
    "I32": ("IntStorage", 4),
    "I16": ("ShortStorage", 2),
    "I8": ("CharStorage", 1),
    "U8": ("ByteStorage", 1),
    "BOOL": ("BoolStorage", 1),
}
"""torch's storage class and the bytes of a value, by safetensors' name of the type."""


@dataclass(frozen=True, slots=True)
class NamedValues:
    """Tensor with its values, little-endian, the last dimension running fastest."""

    name: str
    dtype: str
    """A key of STORAGES."""
    shape: tuple[int, ...]
    values: bytes


def pickled(tensors: Iterable[NamedValues]) -> bytes:
    """A pickle of list[tuple[str, torch.Tensor]]. Each tensor below 4 GiB."""
    entries = b"".join(_text(tensor.name) + _tensor(tensor) + b"\x86" for tensor in tensors)  # TUPLE2
    return b"\x80\x03](" + entries + b"e."  # PROTO 3, EMPTY_LIST, MARK ... APPENDS, STOP


def _tensor(tensor: NamedValues) -> bytes:
    """_rebuild_tensor_v2(storage, storage_offset, size, stride, requires_grad, backward_hooks)."""
    saved = _saved_storage(tensor)
    storage = b"ctorch.storage\n_load_from_bytes\n" + b"B" + struct.pack("<I", len(saved)) + saved + b"\x85R"
    arguments = storage + _number(0) + _numbers(tensor.shape) + _numbers(_strides(tensor.shape))
    hooks = b"ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + arguments + b"\x89" + hooks + b"tR"  # NEWFALSE, TUPLE, REDUCE


def _saved_storage(tensor: NamedValues) -> bytes:
    """Storage as torch.save writes it, with ("storage", class, key, location, values) as its persistent id."""
    storage, value_bytes = STORAGES[tensor.dtype]
    count = len(tensor.values) // value_bytes
    identity = _text("storage") + f"ctorch\n{storage}\n".encode() + _text("0") + _text("cpu") + _number(count)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as parts:
        parts.writestr("archive/data.pkl", b"\x80\x02(" + identity + b"tQ.")  # PROTO 2, MARK ... TUPLE, BINPERSID, STOP
        parts.writestr("archive/byteorder", b"little")
        parts.writestr("archive/data/0", tensor.values)
        parts.writestr("archive/version", b"3\n")
    return archive.getvalue()


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, in values."""
    return tuple(accumulate((max(n, 1) for n in reversed(shape[1:])), mul, initial=1))[::-1] if shape else ()


def _text(text: str) -> bytes:
    raw = text.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def _number(number: int) -> bytes:
    if number < 1 << 31:
        return b"J" + struct.pack("<i", number)
    return b"\x8a\x08" + struct.pack("<q", number)  # LONG1


def _numbers(numbers: Sequence[int]) -> bytes:
    return b"(" + b"".join(_number(n) for n in numbers) + b"t"
