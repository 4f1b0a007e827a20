"""Server of the admin page: uvicorn inside the supervisor, which leaves signals to its owner and ends when told to."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp

from buffer_service.security.certificates import Certificates, RenewedContext
from buffer_wire.connection.http_protocol import AnswersOnce

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import RequestResponseCycle

MAX_HEADER_BYTES = 16 << 10
MAX_REQUESTS = 512
"""Connections and requests at once; more are answered with 503."""
SPARE = 64
"""Connections beyond MAX_REQUESTS that are told that there are too many; more are closed as they come."""
ACCEPTED_AT_ONCE = 16
"""Connections that asyncio accepts before it looks at the first of them, and again before it is told of them."""
BACKLOG = 128
"""Connections that wait to be accepted."""

REQUEST_S = 10.0
"""A connection that brings no whole request for this long is closed; between two looks it may be up twice as long."""


class _Protocol(AnswersOnce):
    """Protocol that waits only so long for a first request, and for the rest of one that has begun."""

    _timer: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if len(self.connections) > (self.limit_concurrency or MAX_REQUESTS) + SPARE:
            transport.abort()
        self._timer = self.loop.call_later(REQUEST_S, self._look, None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def _look(self, seen: object) -> None:
        """Abort when there is no request, and was none at the last look, since the response `seen` was complete."""
        if self.transport.is_closing():
            return
        cycle: RequestResponseCycle | None = self.cycle  # None until the first request
        waits = cycle is None or cycle.response_complete
        if waits and cycle is seen:
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(REQUEST_S, self._look, cycle if waits else self)


class AdminServer(uvicorn.Server):
    """Serves the admin page on a socket that is already bound; `should_exit` ends `serve`.

    `at_end` is called when the server begins to stop: it ends the answers that have no end of their own.
    """

    def __init__(
        self,
        app: ASGIApp,
        certificates: Certificates | None = None,
        at_end: Callable[[], None] | None = None,
        max_requests: int = MAX_REQUESTS,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            # No proxy is believed: refusals are counted by the address that connects.
            proxy_headers=False,
            timeout_graceful_shutdown=2,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            limit_concurrency=max_requests,
            backlog=ACCEPTED_AT_ONCE,
        )
        config.load()
        if certificates is not None:
            config.ssl = RenewedContext.of(certificates)
        super().__init__(config)
        self._at_end = at_end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen."""
        await super().startup(sockets)
        for listener in sockets or ():
            # The kernel's line of those who wait may be longer than what is accepted at once.
            listener.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop serving."""
        if self._at_end is not None:
            self._at_end()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: the supervisor handles them."""
        yield

    async def serve_on(self, listener: socket.socket) -> None:
        """Serve until `should_exit`."""
        await self.serve(sockets=[listener])
