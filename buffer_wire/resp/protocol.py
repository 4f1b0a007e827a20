"""Connection to a store: the RESP2 protocol with requests pipelined and bodies that are never copied needlessly.

Bodies are handed to the transport as they are, and large ones are received straight into their own memory. Invariants:
replies come in the order of requests, so each belongs to the oldest unanswered request. A request is written whole, so
requests of several callers never mix. When the connection is lost every unanswered request ends in ConnectionLost.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

from buffer_wire.resp.encoding import Parts, encode
from buffer_wire.resp.errors import ConnectionLost, ReplyError

READ_BYTES = 1 << 18
OWN_MEMORY_BYTES = 1 << 15
"""Bulk replies above it are received into memory of their own."""


class _Request:
    __slots__ = ("expected", "future", "replies")

    def __init__(self, expected: int, future: asyncio.Future[list[Any]]) -> None:
        self.expected = expected
        self.future = future
        self.replies: list[Any] = []


class RespConnection(asyncio.BufferedProtocol):
    """A connected protocol. `request` sends commands and waits for their replies."""

    def __init__(self, on_push: Callable[[Any], None] | None = None) -> None:
        self._on_push = on_push
        self._transport: asyncio.Transport | None = None
        self._pending: deque[_Request] = deque()
        self._writable = asyncio.Event()
        self._writable.set()
        self._view = memoryview(bytearray(READ_BYTES))
        self._buffer: bytearray = self._view.obj  # type: ignore[assignment]
        self._start = self._end = 0
        self._bulk: memoryview | None = None
        self._bulk_filled = 0
        self._open_arrays: list[tuple[int, list[Any]]] = []
        self._finishing = False
        self.lost: str | None = None
        """Reason why the connection ended, None while it lives."""
        self.server = ""
        """Run id of the server that the connection leads to: a server has another one after each start."""
        self.tenure = ""
        """Term of that server as primary: a server may be primary again, with data that another one had meanwhile."""
        self.appends = False
        """True when that server has an append-only file."""

    @property
    def is_over(self) -> bool:
        """True when nothing can be sent any more, also where `lost` does not say so yet.

        In Python 3.12 asyncio's transports fail on what is written between their end and the news of it.
        """
        return self.lost is not None or (self._transport is not None and self._transport.is_closing())

    @property
    def is_writable(self) -> bool:
        """True while the transport has room."""
        return self._writable.is_set()

    async def writable(self) -> None:
        """Wait until the transport has room, or the connection is lost."""
        await self._writable.wait()

    async def request(self, commands: Sequence[Parts]) -> list[Any]:
        """Send commands in one write; their replies, errors among them as ReplyError instances.

        Raises ConnectionLost.
        """
        if not self._writable.is_set():
            await self._writable.wait()
        if self._transport is None or self.is_over:
            raise ConnectionLost(self.lost or "not connected")
        future: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._pending.append(_Request(len(commands), future))
        self._transport.writelines(encode(commands))
        return await future

    def abort(self, why: str) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()
        self.connection_lost(ConnectionLost(why))

    def finish(self) -> None:
        """End the connection once what was sent over it is answered."""
        self._finishing = True
        self._end_if_finished()

    def _end_if_finished(self) -> None:
        # Once: a transport of TLS that is closed again forgets its connection, and cannot be aborted any more.
        if self._finishing and not self._pending and self._transport is not None and not self._transport.is_closing():
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport, once it is there."""
        # uvloop's transports are no subclasses.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """End every unanswered request."""
        if self.lost is not None:
            return
        self.lost = str(exc) if exc is not None else "the connection was closed"
        self._writable.set()
        while self._pending:
            future = self._pending.popleft().future
            if not future.done():
                future.set_exception(ConnectionLost(self.lost))
        if self._on_push is not None:
            self._on_push(ConnectionLost(self.lost))

    def pause_writing(self) -> None:
        """Hold further requests back: the transport's buffer is full."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Let requests through again: the transport's buffer has room."""
        self._writable.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Memory for the next bytes: that of a large body under way, else the read buffer."""
        del sizehint
        if self._bulk is not None:
            return self._bulk[self._bulk_filled :]
        return self._view[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have come."""
        if self._bulk is None:
            self._end += nbytes
            self._parse()
            return
        self._bulk_filled += nbytes
        if self._bulk_filled == len(self._bulk):
            body, self._bulk = self._bulk[:-2], None
            self._emit(body)

    def _parse(self) -> None:
        buffer, view = self._buffer, self._view
        start, end = self._start, self._end
        while start < end:
            line_end = buffer.find(b"\r\n", start, end)
            if line_end < 0:
                break
            kind, line, after = buffer[start], bytes(view[start + 1 : line_end]), line_end + 2
            if kind == _BULK and (size := int(line)) >= 0:
                if end - after < size + 2:
                    if size > OWN_MEMORY_BYTES:
                        self._begin_bulk(size, view[after:end])
                        start = end
                    break
                self._emit(bytes(view[after : after + size]))
                after += size + 2
            elif kind == _ARRAY and (count := int(line)) > 0:
                self._open_arrays.append((count, []))
            else:
                self._emit(_SIMPLE[kind](line))
            start = after
        self._keep(start, end)

    def _keep(self, start: int, end: int) -> None:
        """Move the unparsed rest to the front of the buffer."""
        rest = end - start
        if rest and start:
            self._view[:rest] = bytes(self._view[start:end])
        self._start, self._end = 0, rest

    def _begin_bulk(self, size: int, received: memoryview) -> None:
        import numpy as np  # noqa: PLC0415 - the supervisor, who meets no large reply, does without

        # Not a bytearray: that would be filled with zeros first.
        memory = np.empty(size + 2, dtype=np.uint8).data
        memory[: len(received)] = received
        self._bulk, self._bulk_filled = memory, len(received)

    def _emit(self, value: Any) -> None:  # noqa: ANN401 - a reply is of any type
        arrays = self._open_arrays
        while arrays:
            count, elements = arrays[-1]
            elements.append(value)
            if len(elements) < count:
                return
            arrays.pop()
            value = elements
        if self._on_push is not None and (not self._pending or _is_message(value)):
            self._on_push(value)
            return
        request = self._pending[0]
        request.replies.append(value)
        if len(request.replies) == request.expected:
            self._pending.popleft()
            if not request.future.done():
                request.future.set_result(request.replies)
            self._end_if_finished()


_BULK, _ARRAY = ord("$"), ord("*")

_SIMPLE: dict[int, Callable[[bytes], Any]] = {
    ord("+"): bytes,
    ord(":"): int,
    ord("-"): lambda line: ReplyError(line.decode("utf-8", "replace")),
    _BULK: lambda _absent: None,
    _ARRAY: lambda count: [] if count == b"0" else None,
}


def _is_message(value: Any) -> bool:  # noqa: ANN401
    """A published message, which answers no request."""
    return isinstance(value, list) and value[0] == b"pmessage"
