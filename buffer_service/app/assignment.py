"""Assignment of the supervisor to an rpc process, and the word of its answer. Knows neither gRPC nor the store."""

import ctypes
import os
import signal
import sys
from dataclasses import dataclass
from json import dumps, loads
from typing import Self

from buffer_service.rpc_settings import RpcSettings

READY = b"ready\n"
"""Word that an rpc process writes to standard output once it serves RPCs."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Assignment of an rpc process: the address to serve, the store, and the settings."""

    supervisor_pid: int
    address: str
    """Address to serve, host:port; the port is never 0."""
    store: str
    """URL of the store; on standard input and not on the command line, since it may hold a password."""
    settings: RpcSettings
    embedded: bool = False
    """True when the store is the supervisor's child."""
    metrics: int = -1
    """Descriptor of the memory for the values of its metrics (observability/shared_values.py); -1 for its own."""

    def to_json(self) -> bytes:
        """Encode as one line of JSON."""
        settings = self.settings.to_values()
        told = [self.supervisor_pid, self.address, self.store, settings, self.embedded, self.metrics]
        return dumps(told).encode() + b"\n"

    @classmethod
    def from_json(cls, line: bytes) -> Self:
        """The inverse of `to_json`."""
        supervisor_pid, address, store, settings, *others = loads(line)
        return cls(supervisor_pid, address, store, RpcSettings.from_values(settings), *others)


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies, however it dies (Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent_pid:
        # It died before the kernel was told.
        sys.exit(1)
