"""A TCP address that leads to a unix socket, until it is closed, and when it is opened again."""

import contextlib
import socket
import socketserver
import threading
from pathlib import Path
from typing import Self


class Door:
    """Open as a context; connections to `port` of this host lead to the unix socket."""

    def __init__(self, to: Path) -> None:
        self.port = 0
        self._to = to
        self._server: _Server | None = None

    def open(self) -> None:
        """Let connections through, at the same port as before."""
        self._server = _Server(("127.0.0.1", self.port), self._to)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,)).start()

    def close(self) -> None:
        """End what goes through, and refuse what comes."""
        if self._server is not None:
            self._server.shutdown()
            self._server.end_connections()
            self._server.server_close()
            self._server = None

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True

    def __init__(self, at: tuple[str, int], to: Path) -> None:
        self.to = to
        self._through: set[socket.socket] = set()
        super().__init__(at, _Connection)

    def end_connections(self) -> None:
        """End every connection; those who carry their bytes notice."""
        for one in list(self._through):
            _end(one)

    def carry(self, near: socket.socket) -> None:
        """Carry bytes both ways until one side ends."""
        with socket.socket(socket.AF_UNIX) as far:
            far.connect(str(self.to))
            self._through.add(near)
            back = threading.Thread(target=_carry, args=(far, near))
            back.start()
            _carry(near, far)
            back.join()
            self._through.discard(near)


class _Connection(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        self.server.carry(self.request)


def _carry(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    _end(source)
    _end(target)


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
