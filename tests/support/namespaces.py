"""Two network namespaces, a service's and its clients', joined by a cable. To make them takes root."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.mortal import mortal

SERVICE, STORE, CLIENTS = "10.77.0.1", "10.78.0.1", "10.77.0.2"
"""Address that clients always reach, one of the same host that they reach only by a route, and their own."""


class Namespaces:
    """The two. `service` and `clients` are commands that another's begins with, to be run there."""

    def __init__(self, service: int, clients: int) -> None:
        self.service, self.clients = ([*_entering(pid)] for pid in (service, clients))

    def open_store(self) -> None:
        """Let clients reach STORE."""
        _ip(self.clients, "route", "replace", STORE, "via", SERVICE)

    def close_store(self) -> None:
        """Have whatever clients send to STORE disappear, also on connections that are up."""
        _ip(self.clients, "route", "replace", "blackhole", STORE)

    def join(self, clients: int) -> None:
        """Lay the cable."""
        _ip(self.service, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", str(clients))
        for within, address in ((self.service, SERVICE), (self.clients, CLIENTS)):
            _ip(within, "addr", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                _ip(within, "link", "set", device, "up")
        _ip(self.service, "addr", "add", f"{STORE}/32", "dev", "lo")


@contextmanager
def namespaces(*, clients_here: bool = False) -> Iterator[Namespaces]:
    """The two, while the context lasts; skips the test where that is not allowed.

    `clients_here`: clients are in the namespace of the tests.
    """
    if any(shutil.which(name) is None for name in ("unshare", "nsenter", "ip")):
        pytest.skip("network namespaces take util-linux and iproute2")
    holder = mortal([str(shutil.which("unshare")), "--net", "sleep", "infinity"])
    holders = [subprocess.Popen(holder) for _ in range(1 if clients_here else 2)]
    try:
        for each in holders:
            _until_apart(each)
        clients = os.getpid() if clients_here else holders[1].pid
        made = Namespaces(holders[0].pid, clients)
        try:
            made.join(clients)
        except OSError as error:
            pytest.skip(f"network namespaces cannot be joined: {error}")
        yield made
    finally:
        for each in holders:
            each.kill()
            each.wait()


def _ip(within: Sequence[str], *arguments: str) -> None:
    done = subprocess.run([*within, "ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr}")


def _entering(pid: int) -> tuple[str, ...]:
    return ("nsenter", "--target", str(pid), "--net", "--")


def _until_apart(holder: subprocess.Popen[bytes]) -> None:
    own, deadline = Path("/proc/self/ns/net").readlink(), time.monotonic() + 10
    while Path(f"/proc/{holder.pid}/ns/net").readlink() == own:
        if holder.poll() is not None or time.monotonic() > deadline:
            pytest.skip("network namespaces cannot be made")
        time.sleep(0.01)
