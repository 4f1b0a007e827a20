"""Tensors of a flattened bucket, made of its pickle as SGLang's FlattenedTensorBucket makes them."""

import pickle
from typing import Any


def tensors_in(pickled: bytes) -> list[tuple[str, Any]]:
    """Names and tensors, in order."""
    bucket = pickle.loads(pickled)
    flat = bucket["flattened_tensor"]
    return [
        (meta.name, flat[meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape))
        for meta in bucket["metadata"]
    ]
