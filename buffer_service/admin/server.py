"""uvicorn inside the supervisor: it must leave signals to its owner and end when told to."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette


class AdminServer(uvicorn.Server):
    """Serves the admin page on a socket that is already bound; `should_exit` ends `serve`."""

    def __init__(self, app: Starlette) -> None:
        super().__init__(
            uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=2)
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the supervisor's."""
        yield

    async def serve_on(self, listener: socket.socket) -> None:
        """Serve until `should_exit`."""
        await self.serve(sockets=[listener])
