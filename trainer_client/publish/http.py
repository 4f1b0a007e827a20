"""Small http server for the files of live manifests, in ranges.

Invariants: a path is looked up among the files that are offered, never on the disk, so that nothing else can be read. A
file once opened is served to its end, even if it is removed meanwhile. Its door says who may read, and whether over
TLS; without a token, listen on loopback or on a network that only engines reach.
"""

import logging
import re
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from buffer_wire.weights.door import CHALLENGE, WeightsDoor

logger = logging.getLogger("trainer_client")

IDLE_TIMEOUT_S = 60.0
CLOSE_POLL_S = 0.05
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


@dataclass(frozen=True, slots=True)
class ServedFile:
    """File that may be served."""

    path: Path
    size_bytes: int
    sha256: str


Lookup = Callable[[str], ServedFile | None]
"""Function that finds the file of a path without its leading slash; None when it is not offered."""


class FileServer:
    """Server of the files that `lookup` finds, in threads of its own, until it is closed.

    Raises OSError if the port is taken.
    """

    def __init__(self, lookup: Lookup, *, host: str, port: int, door: WeightsDoor | None = None) -> None:
        door = door or WeightsDoor()
        handler = type("Handler", (_Handler,), {"lookup": staticmethod(lookup), "door": door})
        self._server = _Server((host, port), handler, door)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(CLOSE_POLL_S,), name="weights-http", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """Port that the server listens on."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop listening; transfers under way go on."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], door: WeightsDoor) -> None:
        self._door = door
        super().__init__(address, handler)

    def get_request(self) -> tuple[socket.socket, object]:
        """Accept a connection; its handshake is left to its own thread."""
        accepted, address = super().get_request()
        if self._door.tls is None:
            return accepted, address
        self._door.renew()
        return self._door.tls.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False), address

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002 - the base class calls it
        """Log errors of a request, except a client's disconnect or timeout."""
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError | ssl.SSLError):
            logger.error("weights-http: %s", client_address, exc_info=error)


class _Handler(BaseHTTPRequestHandler):
    lookup: Lookup
    door: WeightsDoor
    protocol_version = "HTTP/1.1"
    timeout = IDLE_TIMEOUT_S
    server_version = "rollout-buffer-weights"

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        logger.debug("weights-http: %s", format % args)

    def _answer(self, *, body: bool) -> None:
        if not self.door.admits(self.headers.get("Authorization")):
            self.send_response(HTTPStatus.UNAUTHORIZED)
            self.send_header("WWW-Authenticate", CHALLENGE)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        found = self.lookup(unquote(urlsplit(self.path).path).removeprefix("/"))
        if found is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            file = found.path.open("rb")
        except FileNotFoundError:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        with file:
            self._send(found, file, body=body)

    def _send(self, found: ServedFile, file: BinaryIO, *, body: bool) -> None:
        try:
            wanted = parse_range(self.headers.get("Range"), found.size_bytes)
        except ValueError:
            self.send_response(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
            self.send_header("Content-Range", f"bytes */{found.size_bytes}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        start, stop = wanted or (0, found.size_bytes)
        self.send_response(HTTPStatus.OK if wanted is None else HTTPStatus.PARTIAL_CONTENT)
        if wanted is not None:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{found.size_bytes}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("ETag", f'"{found.sha256}"')
        self.end_headers()
        if body and stop > start:
            self.wfile.flush()
            self.connection.sendfile(file, start, stop - start)


def parse_range(header: str | None, size_bytes: int) -> tuple[int, int] | None:
    """Parse a Range header into bytes [start, stop); None for the whole file.

    The whole file is meant without a header, and by one that may be ignored: another unit, several ranges, a last byte
    before the first. Raises ValueError when the range cannot be satisfied.
    """
    match = _RANGE.fullmatch(header.strip()) if header else None
    first, last = match.groups() if match is not None else ("", "")
    if not first and not last:
        return None
    if not first:
        start, stop = max(0, size_bytes - int(last)), size_bytes
    elif last and int(last) < int(first):
        return None
    else:
        start, stop = int(first), min(int(last) + 1, size_bytes) if last else size_bytes
    if start >= stop:
        raise ValueError(f"range {header!r} lies outside of {size_bytes} bytes")
    return start, stop
