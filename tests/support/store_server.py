"""A private store server for tests: on a unix socket in a folder of its own, without persistence unless asked for."""

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from buffer_service.store.binary import find_binary


class StoreServer:
    """A valkey-server or redis-server child. `stop` it, or use it as a context."""

    def __init__(self, *settings: str, binary: Path | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rbt-"))
        self.socket = self.folder / "s"
        self.binary = binary or find_binary()
        self.settings = settings
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Address for RedisRunStore.connect."""
        return f"unix://{self.socket}"

    def start(self) -> Self:
        """Start and wait until it answers."""
        command = [
            str(self.binary), "--port", "0", "--unixsocket", str(self.socket), "--dir", str(self.folder),
            "--save", "", "--loglevel", "warning", *self.settings,
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while self._ask() != b"+PONG\r\n":
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.binary} did not start")
            time.sleep(0.01)
        return self

    def _ask(self) -> bytes:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.socket))
            connection.sendall(b"PING\r\n")
            return connection.recv(64)
        return b""

    def kill(self) -> None:
        """kill -9."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """End the server and delete its folder."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


@contextlib.contextmanager
def store_server(*settings: str, binary: Path | None = None) -> Iterator[StoreServer]:
    """A running server."""
    with StoreServer(*settings, binary=binary) as server:
        yield server
