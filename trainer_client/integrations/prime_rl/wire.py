"""Encoding of a rank's micro-batches as MessagePack: a list of MicroBatch, each an array of its fields in order.

Contract followed: `MicroBatch` and `RoutedExperts` of prime_rl/transports/rollouts/types.py at 559b447. They are
structs of msgspec with array_like and omit_defaults: trailing fields that are nil are left out. Numbers have one width
each (int32, float32), so that a column is one copy.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from buffer_wire.layout import Array
from trainer_client.integrations.prime_rl.micro_batches import MicroBatch

FIELDS = (
    "input_ids",
    "loss_mask",
    "advantages",
    "inference_logprobs",
    "position_ids",
    "sequence_lengths",
    "temperatures",
    "env_names",
    "seq_lens",
    "ref_logprobs",
    "routed_experts",
    "mm_kwargs",
    "mm_token_type_ids",
    "rl_weights",
    "ce_weights",
    "ref_kl_weights",
)
ROUTED_EXPERTS_FIELDS = ("data", "shape", "dtype")

_NIL, _FALSE, _TRUE = b"\xc0", 0xC2, 0xC3
_INT = np.dtype([("tag", "u1"), ("value", ">i4")])
_FLOAT = np.dtype([("tag", "u1"), ("value", ">f4")])


def encode(micro_batches: Sequence[MicroBatch]) -> bytes:
    """Encode a rank's micro-batches, the content of rank_R.bin."""
    return b"".join([_length(0xDD, len(micro_batches)), *(_micro_batch(each) for each in micro_batches)])


def _micro_batch(batch: MicroBatch) -> bytes:
    lengths = _ints(np.array(batch.lengths))
    fields = [
        _ints(batch.token_ids),
        _bools(batch.loss_mask),
        _floats(batch.advantages),
        _floats(batch.logprobs),
        _ints(batch.position_ids),
        lengths,
        _floats(batch.temperatures),
        _texts(batch.environments),
        # Segments that attention tells apart: without images the same as the rollouts.
        lengths,
        _floats(batch.streams.get("ref_logprobs")),
        _experts(batch.routed_experts),
        _NIL,
        _NIL,
        _floats(batch.streams.get("rl_weights")),
        _floats(batch.streams.get("ce_weights")),
        _floats(batch.streams.get("ref_kl_weights")),
    ]
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
