"""Serves weights over http, in ranges: what a worker has fetched to its peers, what a relay has to its site.

Invariants: read-only; a path is looked up among the files of complete, verified versions, never on the disk, so that
nothing else can be read. The door says who may read, and whether over TLS; without a token, listen on loopback, or on a
network that only workers reach.
"""

import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from buffer_wire.connection.access import WEIGHTS, Access, stays_here
from buffer_wire.errors import InvalidField
from buffer_wire.weights.door import CHALLENGE, WeightsDoor
from rollout_workers.options import WorkerOptions

if TYPE_CHECKING:
    from aiohttp import web

Lookup = Callable[[str, str], Path | None]
"""The file of a version's label and a name; None when it is not offered."""

Handler = Callable[["web.Request"], Awaitable["web.StreamResponse"]]

_log = structlog.get_logger()


def server_of(options: WorkerOptions, lookup: Lookup) -> "WeightServer | None":
    """The server that a worker's options ask for. Raises InvalidField for a certificate that cannot be used."""
    if not options.weights_serve:
        return None
    host, port = host_and_port(options.weights_serve)
    door = door_of(options.weights_serve, options.weights_access, options.weights_tls_cert, options.weights_tls_key)
    return WeightServer(lookup, host=host, port=port, advertise=options.weights_advertise, door=door)


def door_of(address: str, access: Access, tls_cert: str | Path, tls_key: str | Path) -> WeightsDoor:
    """Door of a server at host:port. Raises InvalidField, also where nobody would send the token that it asks for."""
    door = WeightsDoor(access, tls_cert=tls_cert, tls_key=tls_key)
    in_plain_text = stays_here(address) or access.effective(WEIGHTS).insecure
    if door.asks and door.tls is None and not in_plain_text:
        why = "given: the token of the weights is sent to other machines over https alone, unless RB_INSECURE=1"
        raise InvalidField("weights_tls_cert", "", why)
    return door


def host_and_port(address: str) -> tuple[str, int]:
    """Host and port of "host:port"; an IPv6 address is in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


class Listener:
    """Listens at host:port until it is closed. `advertise`: the host that others are told.

    `guarded`: handlers of GET and HEAD by path, for who brings the token; `free`: those for everybody. `serves`: what,
    for the log.
    """

    def __init__(
        self,
        guarded: Mapping[str, Handler],
        *,
        host: str,
        port: int,
        door: WeightsDoor | None = None,
        advertise: str = "",
        free: Mapping[str, Handler] | None = None,
        serves: str = "weights",
    ) -> None:
        self._guarded = guarded
        self._free = free or {}
        self._host = host
        self._port = port
        self._door = door or WeightsDoor()
        self._advertise = advertise
        self._serves = serves
        self._runner: web.AppRunner | None = None
        self.url = ""
        """Base URL that others are told; known once the server is started."""

    async def start(self, *, grace_s: float = 1.0) -> None:
        """Listen; transfers under way at the end have `grace_s`. Raises OSError if the address cannot be had."""
        from aiohttp import web  # noqa: PLC0415 - few workers serve, and aiohttp.web takes long to import

        app = web.Application()
        for path, handler in self._guarded.items():
            app.router.add_get(path, self._admitting(handler))
        for path, handler in self._free.items():
            app.router.add_get(path, handler)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=grace_s)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port, ssl_context=self._door.tls).start()
        port = self._runner.addresses[0][1]
        host = self._advertise or (socket.gethostname() if self._host in ("", "0.0.0.0", "::") else self._host)  # noqa: S104 - compared with
        self.url = f"{self._door.scheme}://[{host}]:{port}" if ":" in host else f"{self._door.scheme}://{host}:{port}"
        _log.info(f"serving {self._serves}", url=self.url, token="asked for" if self._door.asks else "none")

    async def close(self) -> None:
        """Stop listening and, after their time of grace, cut transfers."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _admitting(self, handler: Handler) -> Handler:
        from aiohttp import web  # noqa: PLC0415 - as above

        async def guarded(request: web.Request) -> web.StreamResponse:
            self._door.renew()
            if not self._door.admits(request.headers.get("Authorization")):
                raise web.HTTPUnauthorized(headers={"WWW-Authenticate": CHALLENGE}, text="")
            return await handler(request)

        return guarded


class WeightServer(Listener):
    """Serves what `lookup` finds, as /LABEL/NAME."""

    def __init__(
        self, lookup: Lookup, *, host: str, port: int, advertise: str = "", door: WeightsDoor | None = None
    ) -> None:
        super().__init__({"/{label}/{name:.+}": self._answer}, host=host, port=port, advertise=advertise, door=door)
        self._lookup = lookup

    async def _answer(self, request: "web.Request") -> "web.StreamResponse":
        from aiohttp import web  # noqa: PLC0415 - as above

        path = self._lookup(request.match_info["label"], request.match_info["name"])
        if path is None:
            raise web.HTTPNotFound
        return web.FileResponse(path)
