"""The two processes of a side, driven from here, and the environment in which all clients are started."""

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from buffer_service.store.embedded.server import die_with

ROOT = Path(__file__).parents[2]
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""Environment of clients, and of Reverb's server: glibc keeps big blocks instead of mapping each anew."""
REPLY_TIMEOUT_S = 120.0


class Role:
    """A producer or a consumer: the class of that name of a side's module, in a process of its own."""

    def __init__(self, process: "subprocess.Popen[bytes]", connection: "Connection[Any, Any]", log: Path) -> None:
        self._process = process
        self.connection = connection
        self._log = log

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def start(self, name: str, *arguments: object) -> None:
        """Begin a command; `wait` for its result."""
        self.connection.send((name, arguments))

    def wait(self) -> Any:  # noqa: ANN401 - whatever the command returns
        """The result of the command begun last. Raises RuntimeError with what went wrong there."""
        try:
            if not self.connection.poll(REPLY_TIMEOUT_S):
                raise RuntimeError(f"no answer within {REPLY_TIMEOUT_S:g} s; its log: {_tail(self._log)}")
            status, value = self.connection.recv()
        except (EOFError, ConnectionError):
            raise RuntimeError(f"the process ended: {_tail(self._log)}") from None
        if status == "error":
            raise RuntimeError(value)
        return value

    def call(self, name: str, *arguments: object) -> Any:  # noqa: ANN401
        """Run a command to its end."""
        self.start(name, *arguments)
        return self.wait()


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-800:].strip() or "(empty)"


@contextmanager
def role(python: Path, module: str, which: Literal["producer", "consumer"], folder: Path) -> Iterator[Role]:
    """Start a role; `wait` for it once before its first command. Killed at the end. `folder`: its side's signals."""
    ours, its = socket.socketpair()
    log = folder / f"{which}.log"
    with ours, its, log.open("wb") as out:
        process = subprocess.Popen(
            [python, "-m", "bench.peers.program", str(its.fileno()), module, which, folder],
            pass_fds=[its.fileno()],
            cwd=ROOT,
            env={**os.environ, **MALLOC},
            stdout=out,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with(os.getpid()),  # noqa: PLW1509 - one thread is here
        )
        its.close()
        try:
            yield Role(process, Connection(ours.detach()), log)
        finally:
            process.kill()
            process.wait()
