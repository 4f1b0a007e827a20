"""A blocking connection to a store, for replies whose sizes are known before they come.

Bodies are received straight into the memory that their receivers name. Invariants: every wait ends by its deadline.
After any error the connection is of no use, for what is left of the reply has not been read.
"""

import contextlib
import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from typing import NoReturn, Protocol, Self

import numpy as np

from buffer_wire.resp.encoding import Parts, encode
from buffer_wire.resp.errors import ConnectionLost, OtherReply, ReplyError

FIRST_BYTES = 6
"""Bytes of a body that come before its memory is named; a shorter one comes whole."""
AT_ONCE_BYTES = 1 << 18
"""Bytes that are received between two notes to a body's receiver."""
_SLACK_S = 0.1
"""Time by which a wait may end after its deadline."""
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
        self._patience_s = 0.0
        """Longest wait of the system for one call, in seconds."""

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
        until = self._begun(timeout_s)
        memory, filled = memoryview(bytearray(_LINE_BYTES * count)), 0
        while bytes(memory[:filled]).count(b"\r\n") < count and filled < len(memory):
            filled += self._receive(memory[filled:], until)
        for line in bytes(memory[:filled]).split(b"\r\n")[:count]:
            if line != b"+OK":
                raise _error_of(line, 0)

    def expect_bodies(self, bodies: Sequence[Body], timeout_s: float, *, in_array: bool) -> None:
        """Wait for bodies of exactly these sizes: the reply to an MGET (`in_array`), or the one to a GET.

        Raises ConnectionLost, OtherReply, ReplyError.
        """
        until = self._begun(timeout_s)
        line = memoryview(bytearray(_LINE_BYTES))
        frame = b"*%d\r\n" % len(bodies) if in_array else b""
        for index, body in enumerate(bodies):
            size = body.size
            frame += b"$%d\r\n" % size
            first = self._behind(line, frame, min(FIRST_BYTES, size), index, until)
            memory, filled = body.begin(first), len(first)
            memory[:filled] = first
            while filled < size:
                filled += self._receive(memory[filled : filled + AT_ONCE_BYTES], until, socket.MSG_WAITALL)
                body.came(filled)
            frame = b"\r\n"
        self._behind(line, frame, 0, len(bodies), until)

    def _behind(self, line: memoryview, frame: bytes, count: int, index: int, until: float) -> bytes:
        """Receive the frame, and return so many bytes that come behind it."""
        filled, wanted = 0, len(frame) + count
        while filled < wanted:
            filled += self._receive(line[filled:wanted], until)
            if line[: min(filled, len(frame))] != frame[:filled]:
                self._differs(line, filled, index, until)
        return bytes(line[len(frame) : wanted])

    def _differs(self, memory: memoryview, filled: int, index: int, until: float) -> NoReturn:
        """Raise what the line says that came in place of a frame."""
        while True:
            # The end of the body before it and the head of the array come first.
            *lines, _ = bytes(memory[:filled]).removeprefix(b"\r\n").split(b"\r\n")
            line = next((line for line in lines if not line.startswith(b"*")), None)
            if line is not None or filled >= len(memory):
                raise _error_of(line or bytes(memory[:filled]), index)
            filled += self._receive(memory[filled:], until)

    def _begun(self, timeout_s: float) -> float:
        """Time until which to wait from now on."""
        if not self._is_tls:
            # The system waits by itself: a timeout of Python's has it poll before every call.
            self._socket.settimeout(None)
            self._patience_s = 0.0
        return time.monotonic() + timeout_s

    def _receive(self, memory: memoryview, until: float, flags: int = 0) -> int:
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise ConnectionLost("no answer in time")
        try:
            if self._is_tls:
                self._socket.settimeout(left_s)
                count = self._socket.recv_into(memory)
            else:
                if not left_s <= self._patience_s <= left_s + _SLACK_S:
                    self._patience_s = left_s
                    limit = struct.pack("@ll", int(left_s), max(1, int(left_s % 1 * 1e6)))
                    self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
                count = self._socket.recv_into(memory, 0, flags)
        except (TimeoutError, BlockingIOError) as error:
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
