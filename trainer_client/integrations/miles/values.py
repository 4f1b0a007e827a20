"""Values of a sample's fields as JSON and back, such as Python objects in `metadata`.

Supported beside JSON's own: −inf and NaN, numpy's numbers and arrays, tensors, and the dataclasses of the framework's
own `utils/types.py`. As in JSON, tuples come back as lists and keys as strings. Nothing is pickled, and a class is made
by its name in that one module alone.
"""

import base64
import dataclasses
import json
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

_TAG = "rollout_buffer_type"


def encoded(value: object, types: ModuleType) -> str:
    """Encode `value` as JSON. Raises TypeError for a value that cannot travel."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=partial(_tagged, types))


def decoded(text: str | bytes, types: ModuleType) -> Any:  # noqa: ANN401 - whatever was put
    """Decode the value that `encoded` was given."""
    return json.loads(text, object_hook=partial(_untagged, types))


def _tagged(types: ModuleType, value: Any) -> object:  # noqa: ANN401 - whatever was put
    kind = type(value)
    if isinstance(value, np.generic):
        return value.item()
    if kind.__module__ == "torch" and hasattr(value, "detach"):
        return {_TAG: "tensor", "array": value.detach().cpu().numpy()}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        data = base64.b64encode(value.tobytes()).decode()
        return {_TAG: "array", "dtype": value.dtype.str, "shape": value.shape, "base64": data}
    if dataclasses.is_dataclass(value) and getattr(types, kind.__name__, None) is kind:
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)} | {_TAG: kind.__name__}
    raise TypeError(f"{kind.__module__}.{kind.__name__}")


def _untagged(types: ModuleType, value: dict[str, Any]) -> object:
    kind = value.pop(_TAG, None)
    if kind is None:
        return value
    if kind == "tensor":
        import torch

        return torch.from_numpy(value["array"])
    if kind == "array":
        return np.frombuffer(bytearray(base64.b64decode(value["base64"])), value["dtype"]).reshape(value["shape"])
    return getattr(types, kind)(**value)
