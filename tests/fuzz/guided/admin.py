"""Requests to the admin page, whatever comes over the connection: server, door and routes over a real store.

TOKEN stands for a token that may see the run, OTHER for one of another run. Every few inputs the page is asked for in
order.
"""

import asyncio
import tempfile
from pathlib import Path

from buffer_service.admin.app import AdminPage, Facts
from buffer_service.admin.entrance import Entrance
from buffer_service.admin.server import AdminServer
from buffer_service.observability.shared_values import SharedMetrics
from buffer_service.security.gate import Gate
from buffer_service.security.roles import Role
from buffer_service.security.token_file import TokenFile
from buffer_service.security.tokens import TokenEntry, digest, new_token
from tests.fuzz.guided.http import Watched, exchanged, status_of
from tests.fuzz.sockets import BODIES, HEADERS, METHODS, PATHS
from tests.store.driver import Run, emptied
from tests.support.store_server import StoreServer

RUN = "fuzz-0"
AGAIN_EVERY = 200
ORDINARY = b"GET /api/runs/fuzz-0 HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer TOKEN\r\nConnection: close\r\n\r\n"
_HEAD = b" HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer TOKEN\r\n"
SEEDS = (
    ORDINARY,
    *(b"GET " + path + _HEAD + b"\r\n" for path in PATHS if len(path) < 200),
    b"GET /api/runs/fuzz-0/groups/b/0?sample=0" + _HEAD + b"\r\n",
    b"GET /api/runs/other HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer OTHER\r\n\r\n",
    *(b"GET /api" + _HEAD + header + b"\r\n\r\n" + BODIES[3] for header in HEADERS if len(header) < 200),
    *(method + b" /metrics" + _HEAD + b"\r\n" for method in METHODS if len(method) < 20),
    b"GET / HTTP/1.1\r\nHost: h\r\nAccept: text/html\r\nAuthorization: Basic dTpw\r\n\r\n" + ORDINARY,
)


class _Page:
    """The page of a service with one run."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._watched = Watched(self._loop)
        self._place = Path(tempfile.mkdtemp(prefix="fuzz-admin-"))
        self._tokens = {word: new_token(word.lower()) for word in ("TOKEN", "OTHER")}
        self._store = StoreServer().start()
        self.met = 0
        self._address = self._loop.run_until_complete(self._serve())

    async def _serve(self) -> str:
        store = await emptied(self._store, None)
        run = Run(store, RUN)
        await run.create(batch_groups=1)
        await run.submit("a", "b", "c")
        await run.fill("a", "b")
        await run.batch(0)
        lines = [
            TokenEntry(word.lower(), Role.ADMIN, (runs,), digest(self._tokens[word])).to_line()
            for word, runs in (("TOKEN", "*"), ("OTHER", "x-*"))
        ]
        (self._place / "tokens").write_text("\n".join(lines))
        page = AdminPage(store, Facts("h:1", "redis://h", SharedMetrics(1), str))
        server = AdminServer(Entrance(page.app(), Gate(TokenFile(self._place / "tokens"))))
        self._serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - uvicorn tells nobody
            await asyncio.sleep(0.01)
        port: int = server.servers[0].sockets[0].getsockname()[1]
        return f"127.0.0.1:{port}"

    def meets(self, sent: bytes, *, whole: bool = False) -> bytes:
        """Answers to one input."""
        self.met += 1
        for word, token in self._tokens.items():
            sent = sent.replace(word.encode(), token.encode())
        told = self._loop.run_until_complete(exchanged(self._address, sent, whole=whole))
        self._watched.check()
        for token in self._tokens.values():
            assert token.encode() not in told, "a token is shown"
        return told


_PAGE: list[_Page] = []


def one(data: bytes) -> None:
    """Check that an input is answered with a status below 500, or with nothing, and that the page is there after it."""
    if not _PAGE:
        _PAGE.append(_Page())
    page = _PAGE[0]
    told = page.meets(data)
    assert status_of(told) < 500, told[:2_000]
    if page.met % AGAIN_EVERY == 0:
        assert status_of(page.meets(ORDINARY, whole=True)) == 200, "the page is not there"
