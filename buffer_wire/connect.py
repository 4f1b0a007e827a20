"""Channels to the service, blocking and asyncio, with what a client needs to get in.

The token is added to the metadata of every call by a thin layer over the channel, and not by gRPC's call credentials,
which exist on TLS connections alone, nor by its interceptors, which put queues between a stream and its caller.
"""

from collections.abc import Callable, Iterable
from typing import Any, Self, cast

import grpc
import grpc.aio

from buffer_wire.access import Access, TokenSource
from buffer_wire.channel import Options, client_options

HANDSHAKE_MS = 5_000
"""How long a connection over TLS may take to be up: some round trips, and work on both sides."""

_HANDSHAKE_OPTION = "grpc.min_reconnect_backoff_ms"
"""What gRPC calls that; a failed attempt is still repeated as soon as the other options say."""

Metadata = tuple[tuple[str, str], ...]


class Connector:
    """Makes channels to `target`. Raises InvalidField for unreadable files and tokens that would be exposed."""

    def __init__(self, target: str, access: Access, options: Options | None = None) -> None:
        access = access.effective()
        access.check_target(target)
        self.target = target
        self.tokens = TokenSource(access)
        self._options = client_options() if options is None else options
        self._credentials: grpc.ChannelCredentials | None = None
        if access.over_tls:
            self._credentials = grpc.ssl_channel_credentials(
                access.read("tls_ca"), access.read("tls_key"), access.read("tls_cert")
            )
            self._options = [
                *(option for option in self._options if option[0] != _HANDSHAKE_OPTION),
                (_HANDSHAKE_OPTION, HANDSHAKE_MS),
            ]
        if access.tls_server_name:
            self._options = [*self._options, ("grpc.ssl_target_name_override", access.tls_server_name)]

    def blocking(self, *more: tuple[str, int | str]) -> grpc.Channel:
        """A channel of its own, with `more` options."""
        options = [*self._options, *more]
        if self._credentials is None:
            channel = grpc.insecure_channel(self.target, options)
        else:
            channel = grpc.secure_channel(self.target, self._credentials, options)
        return cast("grpc.Channel", _TokenChannel(channel, self.tokens)) if self.tokens.current else channel

    def asyncio(self) -> grpc.aio.Channel:
        """A channel of its own for the running event loop."""
        if self._credentials is None:
            channel = grpc.aio.insecure_channel(self.target, options=self._options)
        else:
            channel = grpc.aio.secure_channel(self.target, self._credentials, options=self._options)
        return cast("grpc.aio.Channel", _TokenChannel(channel, self.tokens)) if self.tokens.current else channel


class _TokenChannel:
    """A channel whose calls carry the token as it is when they begin."""

    def __init__(self, channel: Any, tokens: TokenSource) -> None:  # noqa: ANN401 - of either kind
        self._channel = channel
        self._tokens = tokens

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the channel's own
        return getattr(self._channel, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close(None)

    def unary_unary(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:  # noqa: ANN401 - as the channel's
        return self._with_token(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:  # noqa: ANN401 - as the channel's
        return self._with_token(self._channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:  # noqa: ANN401 - as the channel's
        return self._with_token(self._channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:  # noqa: ANN401 - as the channel's
        return self._with_token(self._channel.stream_stream(*args, **kwargs))

    def _with_token(self, call: Callable[..., Any]) -> Callable[..., Any]:
        tokens = self._tokens

        def called(*args: Any, metadata: Iterable[tuple[str, str]] | None = None, **kwargs: Any) -> Any:  # noqa: ANN401
            return call(*args, metadata=(*(metadata or ()), *bearer(tokens.current)), **kwargs)

        return called


def bearer(token: str) -> Metadata:
    """The metadata that carries a token."""
    return (("authorization", f"Bearer {token}"),) if token else ()
