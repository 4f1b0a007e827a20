"""The port of the service, held by the supervisor while rpc processes come and go.

The rpc processes share the port (SO_REUSEPORT), which would let a second service join them unnoticed: a plain bind
first finds out whether anybody listens. The socket that is kept never listens, so it receives no connection.
"""

import errno
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from buffer_service.observability.addresses import Address

POLL_S = 0.05


class AddressRefused(RuntimeError):
    """An address that cannot be listened on; the message names it."""


@contextmanager
def reserved(address: Address, wait_s: float = 0.0) -> Iterator[Address]:
    """Reserve the address; yields it with the chosen port when it was 0.

    Raises AddressRefused when it cannot be had within `wait_s`.
    """
    family, host = _resolve(address)
    deadline = time.monotonic() + wait_s
    port = 0
    while not port:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                # As servers do, so that connections in TIME_WAIT do not count as somebody listening.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                port = _bind(probe, host, address.port, address)
        except AddressRefused:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)
    with socket.socket(family, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        _bind(held, host, port, address)
        yield Address(address.host, port)


def listening(address: Address) -> socket.socket:
    """A listening socket of one process's own. Raises AddressRefused."""
    family, host = _resolve(address)
    server = socket.socket(family, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        _bind(server, host, address.port, address)
        server.listen(128)
    except AddressRefused:
        server.close()
        raise
    except OSError as error:
        server.close()
        raise _refused(address, error) from None
    return server


def _resolve(address: Address) -> tuple[socket.AddressFamily, str]:
    try:
        family, _, _, _, bound = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise AddressRefused(f"cannot listen on {address}: {error.strerror or error}") from None
    return family, str(bound[0])


def _bind(sock: socket.socket, host: str, port: int, address: Address) -> int:
    try:
        sock.bind((host, port))
    except OSError as error:
        raise _refused(address, error) from None
    return int(sock.getsockname()[1])


def _refused(address: Address, error: OSError) -> AddressRefused:
    if error.errno == errno.EADDRINUSE:
        return AddressRefused(f"cannot listen on {address}: the address is in use; is another service running on it?")
    return AddressRefused(f"cannot listen on {address}: {error.strerror or error}")
