"""What the supervisor tells an rpc process, and the word with which it answers. Knows neither gRPC nor the store."""

import ctypes
import os
import signal
import sys
from dataclasses import dataclass
from json import dumps, loads
from typing import Self

from buffer_service.rpc_settings import RpcSettings

READY = b"ready\n"
"""Written to standard output once RPCs are served."""

METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Where prometheus_client keeps the values of this process; read when it is imported."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which address to serve, on which store."""

    supervisor_pid: int
    address: str
    """host:port; the port is never 0."""
    store: str
    """URL; on standard input and not on the command line, since it may hold a password."""
    settings: RpcSettings

    def to_json(self) -> bytes:
        """One line."""
        settings = self.settings.to_values()
        return dumps([self.supervisor_pid, self.address, self.store, settings]).encode() + b"\n"

    @classmethod
    def from_json(cls, line: bytes) -> Self:
        """The inverse of `to_json`."""
        supervisor_pid, address, store, settings = loads(line)
        return cls(supervisor_pid, address, store, RpcSettings.from_values(settings))


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies, however it dies (Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent_pid:
        # It died before the kernel was told.
        sys.exit(1)
