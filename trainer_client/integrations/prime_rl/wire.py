"""Encoding of a rank's micro-batches as MessagePack: a list of MicroBatch, each an array of its fields in order.

Contract followed: `MicroBatch` and `RoutedExperts` of prime_rl/transports/rollouts/types.py at 559b447. They are
structs of msgspec with array_like and omit_defaults: trailing fields that are nil are left out. Numbers have one width
each (int32, float32), so that a column is one copy.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from buffer_wire.layout import Array
from trainer_client.integrations.prime_rl.micro_batches import MicroBatch

ROUTED_EXPERTS_FIELDS = ("data", "shape", "dtype")

_NIL, _FALSE, _TRUE = b"\xc0", 0xC2, 0xC3
_INT = np.dtype([("tag", "u1"), ("value", ">i4")])
_FLOAT = np.dtype([("tag", "u1"), ("value", ">f4")])


def encode(micro_batches: Sequence[MicroBatch]) -> bytes:
    """Encode a rank's micro-batches, the content of rank_R.bin."""
    return b"".join([_length(0xDD, len(micro_batches)), *(_micro_batch(each) for each in micro_batches)])


def _micro_batch(batch: MicroBatch) -> bytes:
    fields = [encoded(batch) for encoded in _FIELDS.values()]
    while fields[-1] == _NIL:
        fields.pop()
    return b"".join([_length(0xDD, len(fields)), *fields])


def _length(tag: int, length: int) -> bytes:
    return bytes([tag]) + length.to_bytes(4, "big")


def _ints(values: npt.NDArray[np.integer]) -> bytes:
    return _column(values, _INT, 0xD2)


def _floats(values: npt.NDArray[np.floating] | None) -> bytes:
    return _NIL if values is None else _column(values, _FLOAT, 0xCA)


def _column(values: npt.NDArray[np.generic], dtype: np.dtype[np.void], tag: int) -> bytes:
    out = np.empty(len(values), dtype)
    out["tag"], out["value"] = tag, values
    return _length(0xDD, len(values)) + out.tobytes()


def _bools(values: npt.NDArray[np.bool_]) -> bytes:
    return _length(0xDD, len(values)) + np.where(values, _TRUE, _FALSE).astype(np.uint8).tobytes()


def _texts(runs: Iterable[tuple[str, int]]) -> bytes:
    """Encode texts, each repeated. `runs`: each text with its number of repetitions."""
    runs = list(runs)
    return _length(0xDD, sum(count for _, count in runs)) + b"".join(_text(text) * count for text, count in runs)


def _text(text: str) -> bytes:
    data = text.encode()
    return _length(0xDB, len(data)) + data


def _experts(experts: Array | None) -> bytes:
    if experts is None:
        return _NIL
    data = np.ascontiguousarray(experts).tobytes()
    fields = [_length(0xC6, len(data)), data, _ints(np.array(experts.shape)), _text(experts.dtype.name)]
    return b"".join([_length(0xDD, len(ROUTED_EXPERTS_FIELDS)), *fields])


def _nothing(_: MicroBatch) -> bytes:
    return _NIL


_FIELDS: Mapping[str, Callable[[MicroBatch], bytes]] = {
    "input_ids": lambda batch: _ints(batch.token_ids),
    "loss_mask": lambda batch: _bools(batch.loss_mask),
    "advantages": lambda batch: _floats(batch.advantages),
    "inference_logprobs": lambda batch: _floats(batch.logprobs),
    "position_ids": lambda batch: _ints(batch.position_ids),
    "sequence_lengths": lambda batch: _ints(np.array(batch.lengths)),
    "temperatures": lambda batch: _floats(batch.temperatures),
    "env_names": lambda batch: _texts(batch.environments),
    # Segments that attention tells apart: without images the same as the rollouts.
    "seq_lens": lambda batch: _ints(np.array(batch.lengths)),
    "ref_logprobs": lambda batch: _floats(batch.streams.get("ref_logprobs")),
    "routed_experts": lambda batch: _experts(batch.routed_experts),
    "mm_kwargs": _nothing,
    "mm_token_type_ids": _nothing,
    "rl_weights": lambda batch: _floats(batch.streams.get("rl_weights")),
    "ce_weights": lambda batch: _floats(batch.streams.get("ce_weights")),
    "ref_kl_weights": lambda batch: _floats(batch.streams.get("ref_kl_weights")),
}
FIELDS = tuple(_FIELDS)
"""Names of a micro-batch's fields, in their order."""
