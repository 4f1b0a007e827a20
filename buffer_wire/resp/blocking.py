"""A blocking connection to a store, for replies whose sizes are known before they come.

All bodies of a reply are received straight into one piece of memory, framing between them. Invariants: every wait ends
by its deadline. After any error the connection is of no use, for what is left of the reply has not been read.
"""

import contextlib
import select
import socket
import ssl
import time
from collections.abc import Sequence
from typing import NoReturn, Self

import numpy as np

from buffer_wire.resp.encoding import Parts, encode
from buffer_wire.resp.errors import ConnectionLost, OtherReply, ReplyError

_LINE_BYTES = 512
"""Longest line that is read, in bytes; only errors are longer, and they are cut off."""
_HUGE_BYTES = 2 << 20
"""Size of a huge page. numpy asks the system for them in memory of at least two."""


class BlockingConnection:
    """A connection that is there. For one thread at a time."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    @classmethod
    def to_unix(cls, path: str, timeout_s: float) -> Self:
        """Connect to a unix socket. Raises OSError."""
        connecting = socket.socket(socket.AF_UNIX)
        try:
            connecting.settimeout(timeout_s)
            connecting.connect(path)
        except BaseException:
            connecting.close()
            raise
        return cls(connecting)

    @classmethod
    def to_host(cls, host: str, port: int, tls: ssl.SSLContext | None, timeout_s: float) -> Self:
        """Connect to a host. Raises OSError."""
        connecting = socket.create_connection((host, port), timeout_s)
        try:
            connecting.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return cls(tls.wrap_socket(connecting, server_hostname=host) if tls is not None else connecting)
        except BaseException:
            connecting.close()
            raise

    @property
    def is_quiet(self) -> bool:
        """True while nothing comes. Where no reply is due, the end is all that can come."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Close it, and end it: a forked child may hold the socket too."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._socket.close()

    def send(self, commands: Sequence[Parts], timeout_s: float) -> None:
        """Send small commands in one write. Raises ConnectionLost."""
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(b"".join(encode(commands)))
        except OSError as error:
            raise ConnectionLost(str(error)) from error

    def expect_ok(self, count: int, timeout_s: float) -> None:
        """Wait for so many replies, each of them OK. Raises ConnectionLost, OtherReply, ReplyError."""
        until = time.monotonic() + timeout_s
        memory, filled = memoryview(bytearray(_LINE_BYTES * count)), 0
        while bytes(memory[:filled]).count(b"\r\n") < count and filled < len(memory):
            filled += self._receive(memory[filled:], until)
        for line in bytes(memory[:filled]).split(b"\r\n")[:count]:
            if line != b"+OK":
                raise _error_of(line, 0)

    def expect_bodies(self, sizes: Sequence[int], timeout_s: float) -> list[memoryview]:
        """Wait for the reply to an MGET: bodies of exactly these sizes, views of one memory.

        Raises ConnectionLost, OtherReply, ReplyError.
        """
        until = time.monotonic() + timeout_s
        frames = [b"\r\n$%d\r\n" % size for size in sizes] + [b"\r\n"]
        frames[0] = b"*%d%b" % (len(sizes), frames[0])
        starts = [0]
        for frame, size in zip(frames, sizes, strict=False):
            starts.append(starts[-1] + len(frame) + size)
        whole = starts[-1] + len(frames[-1])
        memory = memory_of(max(whole, _LINE_BYTES))
        filled = seen = 0
        while filled < whole:
            filled += self._receive(memory[filled:whole], until)
            while seen < len(frames) and starts[seen] < filled:
                start, frame = starts[seen], frames[seen]
                came = memory[start : min(filled, start + len(frame))]
                if came != frame[: len(came)]:
                    self._differs(memory, start, filled, seen, until)
                if len(came) < len(frame):
                    break
                seen += 1
        return [
            memory[start + len(frame) : start + len(frame) + size].toreadonly()
            for start, frame, size in zip(starts, frames, sizes, strict=False)
        ]

    def expect_body(self, body: memoryview, timeout_s: float) -> None:
        """Wait for the reply to a GET: exactly as many bytes as `body` has, which is filled with them.

        Raises ConnectionLost, OtherReply, ReplyError.
        """
        until = time.monotonic() + timeout_s
        for memory, frame in ((memory_of(_LINE_BYTES), b"$%d\r\n" % len(body)), (body, b""), (memory_of(2), b"\r\n")):
            wanted, filled = len(frame) or len(memory), 0
            while filled < wanted:
                filled += self._receive(memory[filled:wanted], until)
                if frame and memory[:filled] != frame[:filled]:
                    self._differs(memory, 0, filled, 0, until)

    def _differs(self, memory: memoryview, start: int, filled: int, index: int, until: float) -> NoReturn:
        """Raise what the line says that came in place of the frame at `start`."""
        stop = min(len(memory), start + _LINE_BYTES)
        while True:
            # The end of the body before it and the head of the array come first.
            *lines, _ = bytes(memory[start:filled]).removeprefix(b"\r\n").split(b"\r\n")
            line = next((line for line in lines if not line.startswith(b"*")), None)
            if line is not None or filled >= stop:
                raise _error_of(line or bytes(memory[start:stop]), index)
            filled += self._receive(memory[filled:stop], until)

    def _receive(self, memory: memoryview, until: float) -> int:
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise ConnectionLost("no answer in time")
        self._socket.settimeout(left_s)
        try:
            count = self._socket.recv_into(memory)
        except TimeoutError as error:
            raise ConnectionLost("no answer in time") from error
        except OSError as error:
            raise ConnectionLost(str(error)) from error
        if count == 0:
            raise ConnectionLost("the connection was closed")
        return count


def memory_of(size: int) -> memoryview:
    """Memory to receive into, in whole huge pages where it is large: faults of small ones cost more than the receiving.

    Not a bytearray: that would be filled with zeros first.
    """
    if size < 2 * _HUGE_BYTES:
        return np.empty(size, np.uint8).data
    room = np.empty(size + 2 * _HUGE_BYTES, np.uint8)
    start = -room.ctypes.data % _HUGE_BYTES
    return room[start : start + size].data


def _error_of(line: bytes, index: int) -> ReplyError | OtherReply:
    text = line.decode("utf-8", "replace")
    return ReplyError(text[1:]) if text.startswith("-") else OtherReply(index, text)
