"""A private store server for tests: on a unix socket in a folder of its own, without persistence unless asked for."""

import contextlib
import os
import resource
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from buffer_service.store.embedded.binary import find_binary
from buffer_service.store.keys import index_key
from tests.support.mortal import mortal


class StoreServer:
    """A valkey-server or redis-server child. `stop` it, or use it as a context."""

    def __init__(self, *settings: str, binary: Path | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rbt-"))
        self.socket = self.folder / "s"
        self.log = self.folder / "log"
        self.binary = binary or find_binary(os.environ.get("RB_TEST_STORE_BINARY"))
        self.settings = settings
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Address for RedisRunStore.connect."""
        return f"unix://{self.socket}"

    def start(self) -> Self:
        """Start and wait until it answers."""
        self.launch()
        self.until_serving()
        return self

    def launch(self) -> None:
        """Start it. From the main thread alone: the server dies with the one it is from."""
        command = [
            str(self.binary), "--port", "0", "--unixsocket", str(self.socket), "--dir", str(self.folder),
            "--save", "", "--logfile", str(self.log), *self.settings,
        ]  # fmt: skip
        # restore_signals: SIGXFSZ stays ignored, as it is in Python; `fill_disk` would end the server.
        self.process = subprocess.Popen(
            mortal(command), stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL, restore_signals=False
        )

    def until_serving(self) -> None:
        """Wait until it answers, and has loaded its data."""
        self._until(lambda answer: answer != b"" and not answer.startswith(b"-LOADING"))

    def until_loading(self) -> None:
        """Wait until it answers that it is loading its data."""
        self._until(lambda answer: answer.startswith(b"-LOADING"))

    def _until(self, met: Callable[[bytes], bool]) -> None:
        deadline = time.monotonic() + 60
        while not met(self._ask("PING")):
            if self.process is None or self.process.poll() is not None or time.monotonic() > deadline:
                ended = self.process and self.process.poll()
                raise RuntimeError(f"{self.binary} did not start ({ended=}):\n{self.log.read_text()[-4000:]}")
            time.sleep(0.01)

    def flush(self) -> None:
        """Delete everything."""
        answer = self._ask("FLUSHALL")
        if answer != b"+OK\r\n":
            raise RuntimeError(f"FLUSHALL was answered {answer!r}")

    def save(self) -> None:
        """Write out what there is: a server without an append-only file starts with it the next time."""
        answer = self._ask("SAVE")
        if answer != b"+OK\r\n":
            raise RuntimeError(f"SAVE was answered {answer!r}")

    def configure(self, name: str, value: object) -> None:
        """Change a setting while it runs."""
        answer = self._ask(f"CONFIG SET {name} {value}")
        if answer != b"+OK\r\n":
            raise RuntimeError(f"CONFIG SET was answered {answer!r}")

    def fill_disk(self, left: int = 0) -> None:
        """Have no file grow by more than `left` bytes: what a full disk does to a server, without one."""
        largest = max(file.stat().st_size for file in self.folder.rglob("*.aof"))
        self._limit_files(largest + left)

    def free_disk(self) -> None:
        """Have files grow again."""
        self._limit_files(resource.RLIM_INFINITY)

    def _limit_files(self, size: int) -> None:
        assert self.process is not None
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def set_layout(self, run_id: str, layout: int) -> None:
        """Give a run a layout, as a service of another version does."""
        answer = self._ask(f"HSET {index_key(run_id, 'run')} layout {layout}")
        if answer != b":0\r\n":
            raise RuntimeError(f"there is no run {run_id} with a layout: {answer!r}")

    def trim_records(self, run_id: str, keep: int) -> None:
        """Leave the newest events of a run's recording alone, as the store does by itself with a million of them."""
        answer = self._ask(f"XTRIM {index_key(run_id, 'record')} MAXLEN {keep}")
        if not answer.startswith(b":") or answer == b":0\r\n":
            raise RuntimeError(f"there was nothing to trim: {answer!r}")

    def cut_off(self) -> None:
        """End the connections of all clients."""
        answer = self._ask("CLIENT KILL TYPE normal")
        if not answer.startswith(b":"):
            raise RuntimeError(f"CLIENT KILL was answered {answer!r}")

    def _ask(self, command: str) -> bytes:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.socket))
            connection.sendall(f"{command}\r\n".encode())
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
