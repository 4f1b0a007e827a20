"""Damage that knows the form of an input: a field of a message or a value of JSON becomes one beyond its bounds."""

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from random import Random
from typing import Any

from google.protobuf.message import DecodeError, Message

from tests.fuzz.wire import damaged as of_bytes

__all__ = ["of_bytes", "of_json", "of_policies", "of_publishes"]

Damage = Callable[[Random, bytes], bytes]

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 8, 1 << 31, 1 << 53, 1 << 63, 1 << 64, -(1 << 63), 10**30, 0.5, -0.0, 1e308,
    float("inf"), float("-inf"), float("nan"), "", "a", "\0", "\ud800", "\U0001f600", "../x", "/etc/passwd", "a" * 300,
    [], {}, [[]], [0], {"a": {}}, "1", "F32", "text", "user", "system", "tool",
)  # fmt: skip


def of_json(rng: Random, data: bytes) -> bytes:
    """JSON behind the first byte, with one to three values or names replaced, doubled or taken away."""
    if rng.random() < 0.15:
        return of_bytes(rng, data)
    try:
        value = json.loads(data[1:])
    except (ValueError, RecursionError):
        return of_bytes(rng, data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = _changed(rng, value)
    text = json.dumps(value)
    if rng.random() < 0.02:
        text = text.replace("{}", "[" * rng.choice((50, 2_000, 9_000)), 1)
    kind = bytes([rng.randrange(256)]) if rng.random() < 0.1 else data[:1]
    return kind + text.encode()


def _changed(rng: Random, value: Any) -> Any:
    root = [value]
    holder: Any = root
    at: Any = 0
    while isinstance(holder[at], dict | list) and holder[at] and rng.random() < 0.85:
        holder = holder[at]
        at = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
    draw = rng.random()
    if draw < 0.6:
        holder[at] = deepcopy(rng.choice(VALUES))
    elif isinstance(holder, list):
        holder += deepcopy(holder) * rng.choice((1, 1, 40))
    elif draw < 0.75:
        del holder[at]
    elif draw < 0.9:
        holder[rng.choice(("", "a", "\0", "../x", "type", *holder))] = deepcopy(holder[at])
    else:
        holder[at] = [holder[at]] * rng.choice((0, 1, 2))
    return root[0]


def of_policies() -> Damage:
    """Policies as messages and as text."""
    from rollout_buffer.v1 import runs_pb2

    return _of_messages({0: runs_pb2.CreateRunRequest, 1: runs_pb2.UpdatePolicyRequest})


def of_publishes() -> Damage:
    """Requests that publish weights."""
    from rollout_buffer.v1 import weights_pb2

    return _of_messages({0: weights_pb2.PublishRequest})


def _of_messages(kinds: Mapping[int, type[Message]]) -> Damage:
    """Damage to the message behind the first byte, which says its kind."""
    from tests.fuzz.messages import Maker
    from tests.fuzz.world import World

    def damaged(rng: Random, data: bytes) -> bytes:
        kind = kinds.get(data[0] % (len(kinds) + 1)) if data else None
        if kind is None or rng.random() < 0.2:
            return of_bytes(rng, data)
        try:
            message = kind.FromString(data[1:])
        except DecodeError:
            return of_bytes(rng, data)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            Maker(rng, World("fuzz")).change(message)
        return data[:1] + message.SerializeToString()

    return damaged
