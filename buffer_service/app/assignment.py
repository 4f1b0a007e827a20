"""What the supervisor tells an rpc process, and the word with which it answers. Knows neither gRPC nor the store."""

import ctypes
import os
import signal
import sys
from dataclasses import asdict, dataclass
from json import dumps, loads
from typing import Self

from buffer_service.settings import Settings

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
    settings: Settings

    def to_json(self) -> bytes:
        """One line."""
        values = {**asdict(self), "settings": self.settings.model_dump(mode="json")}
        return dumps(values).encode() + b"\n"

    @classmethod
    def from_json(cls, line: bytes) -> Self:
        """The inverse of `to_json`."""
        values = loads(line)
        return cls(**{**values, "settings": Settings(**values["settings"])})


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies, however it dies (Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent_pid:
        # It died before the kernel was told.
        sys.exit(1)
