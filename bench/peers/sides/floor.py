"""The floor of the direct way: SET and RPUSH, BLMPOP, MGET and UNLINK, payloads over raw sockets, and nothing decided.

Large arrays are sent as they lie, and received into the memory that numpy views; no reply is parsed, for lengths are
known.
"""

import socket
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import redis

from bench.peers.groups import Columns, Size
from bench.peers.loops import THREADS, Group, NoFacts, Source, in_threads
from buffer_wire import layout

_WAIT_S = 60


def _command(*parts: bytes) -> bytes:
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


class _Raw:
    """A blocking connection to the store."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)

    def send(self, *pieces: layout.Buffer) -> None:
        left = list(pieces)
        while left:
            sent = self._socket.sendmsg(left)
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if sent:
                left[0] = memoryview(left[0])[sent:]

    def receive(self, count: int) -> memoryview:
        memory = np.empty(count, np.uint8).data
        at = 0
        while at < count:
            if not (came := self._socket.recv_into(memory[at:])):
                raise ConnectionError("the store closed the connection")
            at += came
        return memory

    def lines(self, count: int) -> bytes:
        came = b""
        while came.count(b"\r\n") < count:
            came += self._socket.recv(64)
        return came

    def close(self) -> None:
        self._socket.close()


class Producer(NoFacts):
    """SET of a group and RPUSH of its key, in one write."""

    def __init__(self, queue: str, address: dict[str, str], size: Size) -> None:
        del size
        self._queue = queue.encode()
        self._raws = [_Raw(address["socket"]) for _ in range(THREADS)]

    def push(self, group: Group) -> None:
        """Push a group."""
        self._push(self._raws[0], group)

    def flow(self, source: Source) -> None:
        """Push what the source gives."""

        def by(raw: _Raw) -> Callable[[list[Group]], None]:
            return lambda groups: self._push(raw, groups[0])

        in_threads(source, [by(raw) for raw in self._raws])

    def close(self) -> None:
        """Close the connections."""
        for raw in self._raws:
            raw.close()

    def _push(self, raw: _Raw, group: Group) -> None:
        uid, samples = group
        rewards = np.array([sample.reward for sample in samples], np.float32)
        columns = ([s.tokens for s in samples], [s.logprobs for s in samples], [s.mask for s in samples], rewards)
        arrays = layout.payload_pieces(columns)
        key = b"%b:%d" % (self._queue, uid)
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, sum(map(len, arrays)))
        raw.send(head, *arrays, b"\r\n" + _command(b"RPUSH", self._queue, key))
        if not (told := raw.lines(2)).startswith(b"+OK\r\n:"):
            raise RuntimeError(f"the store answered {told!r}")


class Consumer(NoFacts):
    """BLMPOP of keys until a batch is complete, MGET of the groups, UNLINK before the next."""

    def __init__(self, queue: str, address: dict[str, str], size: Size) -> None:
        self._queue = queue
        self._client: Any = redis.Redis(unix_socket_path=address["socket"])
        self._raw = _Raw(address["socket"])
        tokens = size.samples * size.tokens
        self._parts = list(pairwise(accumulate([4 * tokens, 4 * tokens, tokens, 4 * size.samples], initial=0)))
        self._done: list[bytes] = []

    def pull(self, count: int) -> Sequence[Columns]:
        """Wait for so many groups."""
        self._finish()
        keys: list[bytes] = []
        while len(keys) < count:
            reply = self._client.blmpop(_WAIT_S, 1, self._queue, direction="LEFT", count=count - len(keys))
            if not reply:
                raise TimeoutError(f"{len(keys)} groups of {count}")
            keys += reply[1]
        self._done = keys
        self._raw.send(_command(b"MGET", *keys))
        self._raw.receive(len(b"*%d\r\n" % count))
        size = self._parts[-1][1]
        frame = len(b"$%d\r\n" % size)
        return [self._columns(key, self._raw.receive(frame + size + 2)[frame:-2]) for key in keys]

    def close(self) -> None:
        """Delete what was pulled last, close the connections."""
        self._finish()
        self._client.close()
        self._raw.close()

    def _columns(self, key: bytes, body: memoryview) -> Columns:
        tokens, logprobs, mask, rewards = (body[first:last] for first, last in self._parts)
        return Columns(
            int(key.rpartition(b":")[2]),
            np.frombuffer(tokens, np.int32),
            np.frombuffer(logprobs, np.float32),
            np.frombuffer(mask, np.uint8),
            np.frombuffer(rewards, np.float32),
        )

    def _finish(self) -> None:
        if self._done:
            self._client.unlink(*self._done)
            self._done = []
