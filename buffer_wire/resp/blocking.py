"""A blocking connection to a store, for replies whose sizes are known before they come.

Bodies are received straight into the memory that their receivers name. Invariants: every wait ends by its deadline.
After any error the connection is of no use, for what is left of the reply has not been read.
"""

import contextlib
import select
import socket
import ssl
import time
from collections.abc import Sequence
from typing import NoReturn, Protocol, Self

import numpy as np

from buffer_wire.resp.encoding import Parts, encode
from buffer_wire.resp.errors import ConnectionLost, OtherReply, ReplyError

FIRST_BYTES = 6
"""Bytes of a body that come before its memory is named; a shorter one comes whole."""
_LINE_BYTES = 512
"""Longest line that is read, in bytes; only errors are longer, and they are cut off."""
_HUGE_BYTES = 2 << 20
"""Size of a huge page. numpy asks the system for them in memory of at least two."""


class Body(Protocol):
    """Receiver of one body."""

    @property
    def size(self) -> int:
        """Bytes of the body."""

    def begin(self, first: bytes) -> memoryview:
        """Memory for all of the body, which begins with these FIRST_BYTES; the connection puts them there."""

    def came(self, filled: int) -> None:
        """Take note that so many bytes of the body are there."""


class BlockingConnection:
    """A connection that is there. For one thread at a time."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._is_tls = isinstance(connected, ssl.SSLSocket)

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
            filled += self._receive(until, memory[filled:])
        for line in bytes(memory[:filled]).split(b"\r\n")[:count]:
            if line != b"+OK":
                raise _error_of(line, 0)

    def expect_bodies(self, bodies: Sequence[Body], timeout_s: float, *, in_array: bool) -> None:
        """Wait for bodies of exactly these sizes: the reply to an MGET (`in_array`), or the one to a GET.

        Raises ConnectionLost, OtherReply, ReplyError.
        """
        until = time.monotonic() + timeout_s
        frames = [b"\r\n$%d\r\n" % body.size for body in bodies] + [b"\r\n"]
        frames[0] = (b"*%d\r\n" % len(bodies) if in_array else b"") + frames[0][2:]
        firsts = [min(FIRST_BYTES, body.size) for body in bodies] + [0]
        line, ahead = memoryview(bytearray(_LINE_BYTES)), 0
        for index, body in enumerate(bodies):
            first = self._behind(line, ahead, frames[index], firsts[index], index, until)
            memory, filled = body.begin(first), len(first)
            size = len(memory)
            memory[:filled] = first
            # What is behind a body is received with its end.
            beyond = line[: len(frames[index + 1]) + firsts[index + 1]]
            while filled < size:
                filled += self._receive(until, memory[filled:], beyond)
                body.came(min(filled, size))
            ahead = filled - size
        self._behind(line, ahead, frames[-1], 0, len(bodies), until)

    def _behind(self, line: memoryview, filled: int, frame: bytes, count: int, index: int, until: float) -> bytes:
        """Receive the frame, whose first `filled` bytes are there, and return so many bytes that come behind it."""
        wanted = len(frame) + count
        while True:
            if line[: min(filled, len(frame))] != frame[:filled]:
                self._differs(line, filled, index, until)
            if filled == wanted:
                return bytes(line[len(frame) : wanted])
            filled += self._receive(until, line[filled:wanted])

    def _differs(self, memory: memoryview, filled: int, index: int, until: float) -> NoReturn:
        """Raise what the line says that came in place of a frame."""
        while True:
            # The end of the body before it and the head of the array come first.
            *lines, _ = bytes(memory[:filled]).removeprefix(b"\r\n").split(b"\r\n")
            line = next((line for line in lines if not line.startswith(b"*")), None)
            if line is not None or filled >= len(memory):
                raise _error_of(line or bytes(memory[:filled]), index)
            filled += self._receive(until, memory[filled:])

    def _receive(self, until: float, memory: memoryview, beyond: memoryview | None = None) -> int:
        """Wait for bytes, and put them into the memory and, where they can be had in one call, beyond it."""
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise ConnectionLost("no answer in time")
        self._socket.settimeout(left_s)
        try:
            if beyond is None or self._is_tls:
                count = self._socket.recv_into(memory)
            else:
                count = self._socket.recvmsg_into([memory, beyond])[0]
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
