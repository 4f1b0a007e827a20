"""uvicorn inside the supervisor: it must leave signals to its owner and end when told to."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from buffer_service.security.certificates import Certificates, RenewedContext

MAX_HEADER_BYTES = 16 << 10
MAX_REQUESTS = 512
"""Connections and requests at once; more are answered with 503."""


class AdminServer(uvicorn.Server):
    """Serves the admin page on a socket that is already bound; `should_exit` ends `serve`."""

    def __init__(self, app: ASGIApp, certificates: Certificates | None = None) -> None:
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=2,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            limit_concurrency=MAX_REQUESTS,
        )
        config.load()
        if certificates is not None:
            config.ssl = RenewedContext.of(certificates)
        super().__init__(config)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the supervisor's."""
        yield

    async def serve_on(self, listener: socket.socket) -> None:
        """Serve until `should_exit`."""
        await self.serve(sockets=[listener])
