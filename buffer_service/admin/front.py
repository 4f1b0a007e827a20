"""Front of the admin port: serves the page once there is a store, and answers probes until then.

A store may load its data for many minutes. Kubernetes counts a probe that gets no answer as failed, and would end the
service before it has served.
"""

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from buffer_service.admin.app import AdminPage


class Front:
    """An ASGI application: alive at once, and everything else from `open` on."""

    def __init__(self) -> None:
        self._page: AdminPage | None = None
        self._app: ASGIApp = _starting

    def open(self, page: AdminPage) -> None:
        """Serve the page from now on."""
        self._page, self._app = page, page.app()

    def end(self) -> None:
        """End the answers that have no end of their own."""
        if self._page is not None:
            self._page.feeds.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await self._app(scope, receive, send)


async def _starting(scope: Scope, receive: Receive, send: Send) -> None:
    alive = scope["path"] == "/livez"
    answer = PlainTextResponse("ok\n") if alive else PlainTextResponse("the service is starting\n", 503)
    await answer(scope, receive, send)
