"""EmbeddedStore: a private valkey-server or redis-server child on a unix socket in the data directory.

Invariants: there is one service per data directory. The child dies with its parent (SIGTERM, so it writes out what it
has). What was acknowledged survives what the durability level names. `stop` leaves no process and no socket behind.
Where it listens for clients on other hosts, nobody enters without a password. Never imports grpc: the supervisor owns
it.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from buffer_service.settings import Durability
from buffer_service.store.embedded.binary import find_binary
from buffer_service.store.embedded.data_directory import LONGEST_SOCKET_PATH, DataDirectory
from buffer_service.store.embedded.listener import Listener
from buffer_wire.errors import StoreUnavailable, StoreUnsuitable

PR_SET_PDEATHSIG = 1
POLL_S = 0.01
STOP_TIMEOUT_S = 20.0
LOG_TAIL_BYTES = 2_000


_PERSISTENCE: dict[Durability, tuple[str, ...]] = {
    Durability.MEMORY: ("--appendonly", "no"),
    Durability.PROCESS: ("--appendonly", "yes", "--appendfsync", "no"),
    Durability.HOST: ("--appendonly", "yes", "--appendfsync", "always"),
}


_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    "MALLOC_TOP_PAD_": str(16 << 20),
}
"""Environment for a server built on glibc's malloc, as the wheel's is. Variables that are set already go first.

Up to 256 MB of freed payloads stay mapped for the next, instead of going back to the kernel and coming again page by
page.
"""


class EmbeddedStore:
    """A store of one's own. `start`, give `url` to whoever connects, `stop`.

    data_dir: kept between starts. binary: path of the server, None to look for one. listener: where it listens beside
    its socket; its default user then has a password, which `url` holds. maxmemory_bytes: 0 for no limit.
    rewrite_min_bytes: size from which the append-only file is rewritten when it has doubled. start_timeout_s: for the
    server's first answer; load_timeout_s: for the data to be loaded.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        durability: Durability = Durability.PROCESS,
        binary: str | None = None,
        listener: Listener | None = None,
        maxmemory_bytes: int = 0,
        rewrite_min_bytes: int = 2 << 30,
        start_timeout_s: float = 30.0,
        load_timeout_s: float = 900.0,
    ) -> None:
        self.data_dir = data_dir
        self.durability = durability
        self.listener = listener
        self._password = secrets.token_hex(32) if listener is not None else ""
        self._binary = binary
        self._maxmemory_bytes = maxmemory_bytes
        self._rewrite_min_bytes = rewrite_min_bytes
        self._start_timeout_s = start_timeout_s
        self._load_timeout_s = load_timeout_s
        self._directory: DataDirectory | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._socket_dir: Path | None = None
        self._log_begins = 0
        self.socket_note = ""
        """Reason why the socket is not in the data directory, or empty."""
        self.refuses_writes = False
        """True while the server refuses writes; it also starts so the next time."""

    @property
    def socket_path(self) -> Path:
        """Path of the unix socket."""
        return (self._socket_dir or self.data_dir.absolute()) / "store.sock"

    @property
    def url(self) -> str:
        """Address for RedisRunStore.connect, with the password where there is one."""
        return f"unix://{f':{self._password}@' if self._password else ''}{self.socket_path}"

    @property
    def _shown(self) -> str:
        return f"unix://{self.socket_path}"

    @property
    def log_path(self) -> Path:
        """The server's log."""
        return self.data_dir.absolute() / "store.log"

    @property
    def pid(self) -> int | None:
        """Pid of the server, None when it does not run."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        """Start the server and wait until it has loaded its data.

        The calling thread must live as long as the server shall: the kernel binds the child's death to it. Raises
        StoreUnsuitable (no binary, folder in use), StoreUnavailable (it did not come up; the log's tail says why).
        """
        find_binary(self._binary)
        self._directory = await DataDirectory.acquire(self.data_dir, wait_s=self._start_timeout_s)
        try:
            self._place_socket()
            await self._launch()
        except BaseException:
            await self.stop()
            raise

    async def restart(self) -> None:
        """Start the server again after it died, at the same address, the folder locked all along.

        Raises what `start` raises, and may then be tried again.
        """
        if self._directory is None:
            await self.start()
            return
        await self._end_process(STOP_TIMEOUT_S)
        try:
            await self._launch()
        except BaseException:
            await self._end_process(STOP_TIMEOUT_S)
            raise

    async def wait(self) -> int:
        """Wait until the server ends; returns its exit code (negative: the signal that ended it)."""
        if self._process is None:
            return 0
        return await self._process.wait()

    async def refuse_writes(self, *, refused: bool) -> None:
        """Have the server refuse everything that writes, as one does that lacks replicas. Raises StoreUnavailable."""
        await self._configure("min-replicas-to-write", str(int(refused)))
        self.refuses_writes = refused

    async def read_certificate(self) -> None:
        """Have the server read its certificate again, for new connections. Raises StoreUnavailable."""
        if self.listener is not None:
            await self._configure(*self.listener.certificate)

    async def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End the server cleanly; kill it when it takes longer than `timeout_s`."""
        await self._end_process(timeout_s)
        self.socket_path.unlink(missing_ok=True)
        if self._socket_dir is not None:
            shutil.rmtree(self._socket_dir, ignore_errors=True)
            self._socket_dir = None
        if self._directory is not None:
            self._directory.release()
            self._directory = None

    async def _launch(self) -> None:
        assert self._directory is not None  # noqa: S101 - its callers hold the lock
        binary = find_binary(self._binary)
        self._log_begins = self.log_path.stat().st_size if self.log_path.exists() else 0
        secret = _readable(f"requirepass {self._password}\n" if self._password else "")
        try:
            self._process = await asyncio.create_subprocess_exec(
                str(binary),
                # The rest comes on standard input: others may read a command line.
                "-",
                *self._settings(),
                stdin=secret,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                pass_fds=(self._directory.fileno(),),
                # A terminal's Ctrl-C is for the service, which stops the store last.
                start_new_session=True,
                env={**_MALLOC, **os.environ},
                preexec_fn=die_with(os.getpid()),
            )
        except (OSError, subprocess.SubprocessError) as error:
            # The second where preexec_fn failed. The host is short of processes, memory or descriptors, which passes.
            raise StoreUnavailable(self._shown, f"its server {binary} cannot be started: {error}") from error
        finally:
            os.close(secret)
        await self._wait_until_ready()

    async def _end_process(self, timeout_s: float) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), timeout_s)
            except TimeoutError:
                process.kill()
                await process.wait()

    def _place_socket(self) -> None:
        own = self.data_dir.absolute() / "store.sock"
        if len(os.fsencode(own)) > LONGEST_SOCKET_PATH:
            self._socket_dir = Path(tempfile.mkdtemp(prefix="rollout-buffer-"))
            self.socket_note = (
                f"{own} is longer than the {LONGEST_SOCKET_PATH} bytes that a unix socket's path may have; "
                f"the socket is {self.socket_path}"
            )

    async def _configure(self, *settings: str) -> None:
        answer = await self._ask(f"CONFIG SET {' '.join(map(json.dumps, settings))}\r\n".encode())
        if not answer.startswith(b"+OK"):
            raise StoreUnavailable(self._shown, f"it answered {answer!r}")

    def _settings(self) -> Sequence[str]:
        return (
            *(self.listener.settings if self.listener is not None else ("--port", "0")),
            *("--unixsocket", str(self.socket_path), "--unixsocketperm", "700"),
            *("--dir", str(self.data_dir.absolute()), "--logfile", str(self.log_path), "--daemonize", "no"),
            *("--databases", "1", "--maxmemory", str(self._maxmemory_bytes), "--maxmemory-policy", "noeviction"),
            *("--save", "", *_PERSISTENCE[self.durability]),
            *("--auto-aof-rewrite-min-size", str(self._rewrite_min_bytes)),
            *("--min-replicas-to-write", str(int(self.refuses_writes))),
        )

    async def _wait_until_ready(self) -> None:
        began = time.monotonic()
        while True:
            if self._process is None or self._process.returncode is not None:
                code = None if self._process is None else self._process.returncode
                log = self._log_tail()
                if self.listener is not None and self.listener.is_why(log):
                    raise StoreUnsuitable("embedded", self.listener.refusal(find_binary(self._binary)))
                raise StoreUnavailable(self._shown, f"the server ended with code {code}; its log: {log}")
            answer = await self._ask(b"PING\r\n")
            if answer.startswith(b"+PONG"):
                return
            loads = answer.startswith(b"-LOADING")
            limit_s = self._load_timeout_s if loads else self._start_timeout_s
            if time.monotonic() - began > limit_s:
                why = "is still loading its data" if loads else "does not answer"
                raise StoreUnavailable(
                    self._shown, f"the server {why} after {limit_s:g} s; its log: {self._log_tail()}"
                )
            await asyncio.sleep(POLL_S)

    async def _ask(self, command: bytes) -> bytes:
        try:
            async with asyncio.timeout(5.0):
                reader, writer = await asyncio.open_unix_connection(str(self.socket_path))
                try:
                    if self._password:
                        writer.write(f"AUTH {self._password}\r\n".encode())
                        if not (refusal := await reader.readline()).startswith(b"+OK"):
                            return refusal
                    writer.write(command)
                    return await reader.readline()
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return b""

    def _log_tail(self) -> str:
        try:
            written = self.log_path.read_bytes()[self._log_begins :]
            return written[-LOG_TAIL_BYTES:].decode(errors="replace").strip() or "(empty)"
        except OSError:
            return "(none)"


def _readable(text: str) -> int:
    """A descriptor from which a child reads the text."""
    reading, writing = os.pipe()
    os.write(writing, text.encode())
    os.close(writing)
    return reading


def die_with(parent: int) -> Callable[[], None] | None:
    """Function for a child to call before it becomes a server (preexec_fn); None where the system is not Linux.

    The function asks for SIGTERM when the child's parent, `parent`, dies.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return ask
