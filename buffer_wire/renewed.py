"""A channel over which nothing has to be made anew: calls carry today's token, connections show today's certificate.

gRPC reads a client's certificate once, when a channel is made. So there is a channel behind this one, and another one
as soon as the certificate has changed. Invariants: a call ends on the channel that it began on; a channel that was
replaced is closed when its last call has ended, so no call is lost by a replacement.

The token is added to the metadata of every call here, and not by gRPC's call credentials, which exist on TLS
connections alone, nor by its interceptors, which put queues between a stream and its caller.
"""

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterable
from typing import Any, Self

from buffer_wire.access import TokenSource
from buffer_wire.tls_files import TlsFiles, TlsMaterial

Metadata = tuple[tuple[str, str], ...]

Make = Callable[[TlsMaterial | None], Any]
"""Makes a channel, blocking or asyncio, with the certificates given."""


class _Line:
    """A channel, and the calls on it."""

    __slots__ = ("calls", "channel", "material", "ways")

    def __init__(self, channel: Any, material: TlsMaterial | None) -> None:  # noqa: ANN401 - of either kind
        self.channel = channel
        self.material = material
        self.calls = 0
        self.ways: dict[int, Callable[..., Any]] = {}
        """What the channel made of the ways to call that RenewedChannel numbers."""


class RenewedChannel:
    """What callers of gRPC see: its four ways to call, and `close`."""

    def __init__(self, make: Make, tokens: TokenSource, files: TlsFiles | None) -> None:
        self._make = make
        self._tokens = tokens
        self._files = files
        self._lock = threading.Lock()
        material = files.current if files is not None else None
        self._line = _Line(make(material), material)
        self._replaced: set[_Line] = set()
        """Those that calls are still on."""
        self._closing: set[asyncio.Task[None]] = set()
        self._numbered = 0
        self._closed = False

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the channel's own
        return getattr(self._line.channel, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close(None)

    def close(self, *grace: float | None) -> Any:  # noqa: ANN401 - to be awaited for an asyncio channel
        """Close the connections, as the channel's own `close` does."""
        with self._lock:
            self._closed = True
            lines = [self._line, *self._replaced]
            self._replaced.clear()
        ends = [line.channel.close(*grace) for line in lines]
        return _all_of(ends) if inspect.isawaitable(ends[0]) else None

    def unary_unary(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:  # noqa: ANN401 - as the channel's
        """A request, a reply."""
        return self._way("unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:  # noqa: ANN401 - as the channel's
        """A request, replies."""
        return self._way("unary_stream", args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:  # noqa: ANN401 - as the channel's
        """Requests, a reply."""
        return self._way("stream_unary", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:  # noqa: ANN401 - as the channel's
        """Requests, replies."""
        return self._way("stream_stream", args, kwargs)

    def _way(self, kind: str, made_with: tuple[Any, ...], named: dict[str, Any]) -> Callable[..., Any]:
        tokens = self._tokens
        with self._lock:
            self._numbered += 1
            number = self._numbered

        def called(*args: Any, metadata: Iterable[tuple[str, str]] | None = None, **kwargs: Any) -> Any:  # noqa: ANN401
            line = self._begin()
            ended = False
            try:
                way = line.ways.get(number)
                if way is None:
                    way = line.ways[number] = getattr(line.channel, kind)(*made_with, **named)
                call = way(*args, metadata=(*(metadata or ()), *bearer(tokens.current)), **kwargs)
                ended = not self._told_of_end(call, line)
            except BaseException:
                ended = True
                raise
            finally:
                if ended:
                    self._end(line)
            return call

        return called

    def _told_of_end(self, call: Any, line: _Line) -> bool:  # noqa: ANN401 - a call, or the reply of a blocking one
        """False when the call has ended already; otherwise `_end` comes when it does."""
        if hasattr(call, "add_callback"):
            return bool(call.add_callback(lambda: self._end(line)))
        if hasattr(call, "add_done_callback"):
            call.add_done_callback(lambda _: self._end(line))
            return True
        return False

    def _begin(self) -> _Line:
        """The channel for a call that begins now; another one than before if the certificates have changed."""
        material = self._files.current if self._files is not None else None
        idle = None
        with self._lock:
            line = self._line
            if material is not line.material and not self._closed:
                if line.calls:
                    self._replaced.add(line)
                else:
                    idle = line
                line = self._line = _Line(self._make(material), material)
            line.calls += 1
        if idle is not None:
            self._close(idle)
        return line

    def _end(self, line: _Line) -> None:
        with self._lock:
            line.calls -= 1
            if line.calls or line not in self._replaced:
                return
            self._replaced.discard(line)
        self._close(line)

    def _close(self, line: _Line) -> None:
        end = line.channel.close()
        if inspect.isawaitable(end):
            task = asyncio.ensure_future(_all_of([end]))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


async def _all_of(ends: Iterable[Any]) -> None:
    for end in ends:
        await end


def bearer(token: str) -> Metadata:
    """The metadata that carries a token."""
    return (("authorization", f"Bearer {token}"),) if token else ()
