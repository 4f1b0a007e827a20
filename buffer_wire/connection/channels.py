"""Channels to the service, blocking and asyncio, with the token, the certificates and the trace of the client."""

from collections.abc import Callable
from typing import Any, cast

import grpc
import grpc.aio

from buffer_wire.connection.access import Access, TokenSource
from buffer_wire.connection.channel import Options, client_options
from buffer_wire.connection.renewed import RenewedChannel
from buffer_wire.connection.tls_files import TlsFiles, TlsMaterial
from buffer_wire.tracing.process import tracer

HANDSHAKE_MS = 5_000
"""Longest time to set up a connection over TLS, in milliseconds: some round trips, and work on both sides."""

_HANDSHAKE_OPTION = "grpc.min_reconnect_backoff_ms"
"""Name of gRPC's option for that limit; a failed attempt is still repeated as soon as the other options say."""


class Connector:
    """Makes channels to `target`.

    Raises InvalidField for what is no address, for unreadable files and for tokens that would be exposed.
    """

    def __init__(self, target: str, access: Access, options: Options | None = None) -> None:
        access = access.effective()
        access.check_target(target)
        self.target = target
        self.tokens = TokenSource(access)
        self._options = client_options() if options is None else options
        self._files = TlsFiles(access) if access.over_tls else None
        if self._files is not None:
            self._options = [
                *(option for option in self._options if option[0] != _HANDSHAKE_OPTION),
                (_HANDSHAKE_OPTION, HANDSHAKE_MS),
            ]
        if access.tls_server_name:
            self._options = [*self._options, ("grpc.ssl_target_name_override", access.tls_server_name)]

    def blocking(self, *more: tuple[str, int | str]) -> grpc.Channel:
        """A channel of its own, with `more` options."""
        return cast("grpc.Channel", self._channel(grpc.insecure_channel, grpc.secure_channel, [*self._options, *more]))

    def asyncio(self) -> grpc.aio.Channel:
        """A channel of its own for the running event loop."""
        made = self._channel(grpc.aio.insecure_channel, grpc.aio.secure_channel, self._options)
        return cast("grpc.aio.Channel", made)

    def _channel(self, insecure: Callable[..., Any], secure: Callable[..., Any], options: Options) -> object:
        def make(material: TlsMaterial | None) -> object:
            if material is None:
                return insecure(self.target, options=options)
            credentials = grpc.ssl_channel_credentials(material.ca, material.key, material.cert)
            return secure(self.target, credentials, options=options)

        if self._files is None and not self.tokens.current and tracer() is None:
            return make(None)
        return RenewedChannel(make, self.tokens, self._files)
