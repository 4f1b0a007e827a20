"""Channel that lasts: each call carries today's token and its caller's trace, each new connection shows today's
certificate.

gRPC reads a client's certificate once, when a channel is made. So there is a channel behind this one, and another one
as soon as the certificate has changed. Invariants: a call ends on the channel that it began on. A replaced channel is
closed by the first call that begins after all of its own have ended. So no call is lost by a replacement. Nothing is
kept of a call that has ended.

Token and trace are added to the metadata of every call here. gRPC's call credentials exist on TLS connections alone,
and its interceptors put queues between a stream and its caller.
"""

import asyncio
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Self

from buffer_wire.connection.access import TokenSource
from buffer_wire.connection.tls_files import TlsFiles, TlsMaterial
from buffer_wire.tracing.process import carried

Metadata = tuple[tuple[str, str], ...]

Make = Callable[[TlsMaterial | None], Any]
"""Makes a channel, blocking or asyncio, with the certificates given."""


class _CountedChannel:
    """A channel, and the number of calls on it."""

    __slots__ = ("calls", "channel", "material")

    def __init__(self, channel: Any, material: TlsMaterial | None) -> None:  # noqa: ANN401 - of either kind
        self.channel = channel
        self.material = material
        self.calls = 0


class RenewedChannel:
    """A channel as callers of gRPC see it: its four ways to call, and `close`."""

    def __init__(self, make: Make, tokens: TokenSource, files: TlsFiles | None) -> None:
        self._make = make
        self._tokens = tokens
        self._files = files
        # A call that is collected as garbage ends at once, in the thread that holds the lock, it may be.
        self._lock = threading.RLock()
        material = files.current if files is not None else None
        self._present = _CountedChannel(make(material), material)
        self._replaced: set[_CountedChannel] = set()
        """Replaced channels that still had calls when a call began last."""
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the channel's own
        return getattr(self._present.channel, name)

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
            channels = [self._present, *self._replaced]
            self._replaced.clear()
        ends = [counted.channel.close(*grace) for counted in channels]
        return _all_of(ends) if inspect.isawaitable(ends[0]) else None

    def unary_unary(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:  # noqa: ANN401 - as the channel's
        """Make a caller of a method with one request and one reply."""
        return self._way("unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:  # noqa: ANN401 - as the channel's
        """Make a caller of a method with one request and a stream of replies."""
        return self._way("unary_stream", args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:  # noqa: ANN401 - as the channel's
        """Make a caller of a method with a stream of requests and one reply."""
        return self._way("stream_unary", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:  # noqa: ANN401 - as the channel's
        """Make a caller of a method with a stream of requests and a stream of replies."""
        return self._way("stream_stream", args, kwargs)

    def _way(self, kind: str, made_with: tuple[Any, ...], named: dict[str, Any]) -> Callable[..., Any]:
        tokens = self._tokens
        if self._files is None:
            # One channel for ever, whose calls nobody has to count.
            way = getattr(self._present.channel, kind)(*made_with, **named)
            return lambda *args, metadata=None, **kwargs: way(*args, metadata=_with(metadata, tokens), **kwargs)
        made: tuple[_CountedChannel, Callable[..., Any]] | None = None
        """The way to call that the newest channel used made."""

        def called(*args: Any, metadata: Iterable[tuple[str, str]] | None = None, **kwargs: Any) -> Any:  # noqa: ANN401
            nonlocal made
            counted = self._begin()
            ended = False
            try:
                # Of its own: another thread may call the same way.
                newest = made
                if newest is None or newest[0] is not counted:
                    newest = made = (counted, getattr(counted.channel, kind)(*made_with, **named))
                call = newest[1](*args, metadata=_with(metadata, tokens), **kwargs)
                ended = not self._told_of_end(call, counted)
            except BaseException:
                ended = True
                raise
            finally:
                if ended:
                    self._end(counted)
            return call

        return called

    def _told_of_end(self, call: Any, counted: _CountedChannel) -> bool:  # noqa: ANN401 - a call, or the reply of a blocking one
        """False when the call has ended already; otherwise `_end` comes, once, when it does."""
        if hasattr(call, "add_callback"):
            # gRPC says nothing of the end of a stream that its caller's thread reads and does not read to its status.
            end = weakref.finalize(call, self._end, counted)
            end.atexit = False
            told = bool(call.add_callback(end))
            if not told:
                end.detach()
            return told
        if hasattr(call, "add_done_callback"):
            call.add_done_callback(lambda _: self._end(counted))
            return True
        return False

    def _begin(self) -> _CountedChannel:
        """The channel for a call that begins now; another one than before if the certificates have changed."""
        material = self._files.current if self._files is not None else None
        ended: list[_CountedChannel] = []
        with self._lock:
            counted = self._present
            if material is not counted.material and material != counted.material and not self._closed:
                self._present = _CountedChannel(self._make(material), material)
                self._replaced.add(counted)
                counted = self._present
            counted.calls += 1
            if self._replaced:
                ended = [one for one in self._replaced if not one.calls]
                self._replaced.difference_update(ended)
        # Not where the end is told: gRPC's own thread would wait for itself there, and a fork not for that thread.
        for one in ended:
            self._close(one)
        return counted

    def _end(self, counted: _CountedChannel) -> None:
        with self._lock:
            counted.calls -= 1

    def _close(self, counted: _CountedChannel) -> None:
        end = counted.channel.close()
        if inspect.isawaitable(end):
            task = asyncio.ensure_future(_all_of([end]))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


async def _all_of(ends: Iterable[Any]) -> None:
    for end in ends:
        await end


def _with(metadata: Iterable[tuple[str, str]] | None, tokens: TokenSource) -> Metadata:
    return (*(metadata or ()), *bearer(tokens.current), *carried())


def bearer(token: str) -> Metadata:
    """The metadata that carries a token."""
    return (("authorization", f"Bearer {token}"),) if token else ()
