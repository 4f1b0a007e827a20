"""Serves the versions that a worker has fetched to its peers, over http in ranges.

Invariants: read-only; a path is looked up among the files of complete, verified versions, never on the disk, so that
nothing else can be read. No TLS and no authentication: listen on loopback, or on a network that only workers reach.
"""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from rollout_workers.options import WorkerOptions

if TYPE_CHECKING:
    from aiohttp import web

Lookup = Callable[[str, str], Path | None]
"""The file of a version's label and a name; None when it is not offered."""

_log = structlog.get_logger()


def server_of(options: WorkerOptions, lookup: Lookup) -> "WeightServer | None":
    """The server that a worker's options ask for."""
    if not options.weights_serve:
        return None
    host, _, port = options.weights_serve.rpartition(":")
    return WeightServer(lookup, host=host.strip("[]"), port=int(port), advertise=options.weights_advertise)


class WeightServer:
    """Serves what `lookup` finds at host:port until it is closed. `advertise`: the host that peers are told."""

    def __init__(self, lookup: Lookup, *, host: str, port: int, advertise: str = "") -> None:
        self._lookup = lookup
        self._host = host
        self._port = port
        self._advertise = advertise
        self._runner: web.AppRunner | None = None
        self.url = ""
        """Base URL that peers are told; known once the server is started."""

    async def start(self) -> None:
        """Listen. Raises OSError if the address cannot be had."""
        from aiohttp import web  # noqa: PLC0415 - few workers serve, and aiohttp.web takes long to import

        app = web.Application()
        app.router.add_get("/{label}/{name:.+}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port).start()
        port = self._runner.addresses[0][1]
        host = self._advertise or (socket.gethostname() if self._host in ("", "0.0.0.0", "::") else self._host)  # noqa: S104 - compared with
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        _log.info("serving weights to peers", url=self.url)

    async def close(self) -> None:
        """Stop listening and cut transfers."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _answer(self, request: "web.Request") -> "web.StreamResponse":
        from aiohttp import web  # noqa: PLC0415 - as above

        path = self._lookup(request.match_info["label"], request.match_info["name"])
        if path is None:
            raise web.HTTPNotFound
        return web.FileResponse(path)
