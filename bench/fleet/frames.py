"""Client of gRPC in raw HTTP/2 frames, which costs a load generator a twentieth of what gRPC's own would cost it."""

import asyncio
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 0x1, 0x1, 0x4
_STREAM_WINDOW, _CONNECTION_WINDOW = 1 << 24, 1 << 30


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">BHBBI", len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload


def _text(value: str) -> bytes:
    size = len(value)
    if size < 127:
        return bytes((size,)) + value.encode()
    rest, more = size - 127, b""
    while rest >= 128:
        more += bytes((rest & 127 | 128,))
        rest >>= 7
    return b"\x7f" + more + bytes((rest,)) + value.encode()


def headers(method: str, token: str = "") -> bytes:
    """Header block of calls to a method, "/service/name". Nothing of it is indexed: it may be sent again."""
    fields = [("te", "trailers"), ("content-type", "application/grpc")]
    if token:
        fields.append(("authorization", f"Bearer {token}"))
    # POST, http, and the names :path and :authority are in HPACK's static table.
    block = b"\x83\x86\x04" + _text(method) + b"\x01" + _text("fleet")
    return block + b"".join(b"\x00" + _text(name) + _text(value) for name, value in fields)


@dataclass(slots=True)
class Stream:
    """One call: `on_message` is called with each message's bytes, `on_end` once, at the end of the server's side."""

    on_message: Callable[[bytes], None]
    on_end: Callable[[], None]
    number: int = 0
    rest: bytes = b""


class Connection(asyncio.Protocol):
    """One connection with any number of streams."""

    def __init__(self) -> None:
        self._streams: dict[int, Stream] = {}
        self._next = 1
        self._rest = b""
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def connect(cls, address: str) -> "Connection":
        """A connection to host:port."""
        host, _, port = address.rpartition(":")
        _, made = await asyncio.get_running_loop().create_connection(cls, host, int(port))
        return made

    def begin(self, block: bytes, message: bytes, stream: Stream, *, more: bool = False) -> None:
        """Begin a call with its first message; `more`: others follow."""
        stream.number, self._next = self._next, self._next + 2
        self._streams[stream.number] = stream
        self._write(_frame(_HEADERS, _END_HEADERS, stream.number, block) + _data(stream.number, message, more=more))
        if self._transport is None or self._transport.is_closing():
            self._end(stream.number)

    def close(self) -> None:
        """Close the connection, which cancels its calls."""
        if self._transport is not None:
            self._transport.abort()

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    # ── asyncio's side ───────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send what every connection begins with."""
        self._transport = cast("asyncio.Transport", transport)
        window = struct.pack(">HI", 4, _STREAM_WINDOW)
        grown = struct.pack(">I", _CONNECTION_WINDOW)
        self._write(_PREFACE + _frame(_SETTINGS, 0, 0, window) + _frame(_WINDOW, 0, 0, grown))

    def connection_lost(self, _: Exception | None) -> None:
        """End all calls."""
        for number in list(self._streams):
            self._end(number)

    def data_received(self, data: bytes) -> None:
        """Take all frames that are whole."""
        data = self._rest + data
        at = 0
        while len(data) - at >= 9:
            high, low, kind, flags, number = struct.unpack_from(">BHBBI", data, at)
            end = at + 9 + (high << 16 | low)
            if end > len(data):
                break
            self._take(kind, flags, number, data[at + 9 : end])
            at = end
        self._rest = data[at:]

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == _DATA and (stream := self._streams.get(number)) is not None:
            _messages(stream, payload)
        if kind == _RST or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
            self._end(number)
        elif kind in (_SETTINGS, _PING) and not flags & _ACK:
            self._write(_frame(kind, _ACK, 0, payload if kind == _PING else b""))

    def _end(self, number: int) -> None:
        stream = self._streams.pop(number, None)
        if stream is not None:
            stream.on_end()


def _data(number: int, message: bytes, *, more: bool) -> bytes:
    body = struct.pack(">BI", 0, len(message)) + message
    return _frame(_DATA, 0 if more else _END_STREAM, number, body)


def _messages(stream: Stream, payload: bytes) -> None:
    data = stream.rest + payload
    while len(data) >= 5:
        end = 5 + int.from_bytes(data[1:5])
        if end > len(data):
            break
        stream.on_message(data[5:end])
        data = data[end:]
    stream.rest = data
