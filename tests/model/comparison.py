"""Comparison of replies, errors and views: when two mean the same."""

import dataclasses
from typing import Any

from buffer_wire.errors import RolloutBufferError

_FIELDS: dict[type, tuple[str, ...]] = {}


def canonical(value: Any) -> Any:
    """Plain values that compare equal when both sides mean the same: payload keys are there or not, the hint of a
    Short is for people.
    """
    if value is None or isinstance(value, int | str):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, list | tuple):
        return [canonical(one) for one in value]
    if isinstance(value, dict):
        return {str(key): canonical(field) for key, field in value.items()}
    if isinstance(value, RolloutBufferError):
        return {"reason": value.reason, **value.attributes}
    kind = type(value)
    if kind not in _FIELDS:
        _FIELDS[kind] = tuple(field.name for field in dataclasses.fields(value))
    return {
        name: bool(value.payload_key) if name == "payload_key" else canonical(getattr(value, name))
        for name in _FIELDS[kind]
        if name != "blocked_hint"
    }


def differences(mine: Any, other: Any) -> str:
    """Return what differs between two canonical values."""
    if isinstance(mine, dict) and isinstance(other, dict):
        names = sorted({*mine, *other})
        found = [
            f"{name}: {differences(mine.get(name), other.get(name))}"
            for name in names
            if mine.get(name) != other.get(name)
        ]
        return "{" + "; ".join(found) + "}"
    if isinstance(mine, list) and isinstance(other, list) and len(mine) == len(other):
        found = [
            f"[{i}]: {differences(*both)}" for i, both in enumerate(zip(mine, other, strict=True)) if both[0] != both[1]
        ]
        return "; ".join(found)
    return f"the model has {mine!r}, the subject {other!r}"
