"""SglangLauncher: a local SGLang server as a child process, from its start until nothing of it is left.

SGLang lives in an environment of its own (deploy/sglang-cpu), whose interpreter is named here; the server is reached
over HTTP on the loopback interface alone.

Invariants:
- the server and everything it spawned end with `stop`, and also when this process dies in any way, kill -9 included;
- `start` returns a ready server or raises EngineNotStarted with the end of the server's log, within its deadline; an
  SGLang that is too old is not started.
"""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import time
from collections import deque
from types import TracebackType
from typing import IO, Self

from rollout_workers.engine.errors import EngineError, EngineNotStarted
from rollout_workers.engine.http import HttpConnection
from rollout_workers.engine.sglang import versions
from rollout_workers.engine.sglang.server import SglangServerOptions, arguments, environment, for_cpu

# Runs in the child before SGLang: it asks the kernel to be killed when its parent ends (prctl 1 is PR_SET_PDEATHSIG),
# notices a parent that ended before that, and becomes the server. An exec between fork and SGLang instead of a
# preexec_fn, which is not safe in a process with threads; SGLang's own children do the same towards the server.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the launching process is gone")
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""

# Below the kernel's ephemeral range (from 32768), where any outgoing connection could take the port before SGLang does.
_PORTS = range(20_000, 32_000)
_PORT_ATTEMPTS = 3
_ADDRESS_IN_USE = "address already in use"
_POLL_S = 0.1
_LOG_TAIL_LINES = 30


class SglangLauncher:
    """Launcher of one local server. `async with` starts and stops it; it can be started again after `stop`.

    Start it from a thread that lives as long as the server should: the kernel ties a child to the thread.
    """

    def __init__(self, options: SglangServerOptions) -> None:
        self.options = for_cpu(options) if options.device == "cpu" else options
        self._process: asyncio.subprocess.Process | None = None
        self._port = options.port

    @property
    def base_url(self) -> str:
        """Base URL of the server; final once `start` has returned."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int | None:
        """Process id of the server, and of its process group; None if it was not started."""
        return self._process.pid if self._process is not None else None

    @property
    def returncode(self) -> int | None:
        """Exit code of the server; None while it runs and before the start."""
        return self._process.returncode if self._process is not None else None

    async def start(self) -> str:
        """Start the server and wait until it is ready; returns its base URL. Raises EngineNotStarted."""
        if self._process is not None:
            raise EngineNotStarted(self.base_url, "already started", str(self.options.log_path), "")
        await self._check_python()
        deadline = time.monotonic() + self.options.ready_timeout_s
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            if self.options.port == 0:
                self._port = free_port()
            log_start = await self._spawn()
            try:
                await self._wait_ready(deadline)
                return self.base_url
            except BaseException as error:
                await self._kill()
                taken = _ADDRESS_IN_USE in await asyncio.to_thread(self._log_from, log_start)
                if not (isinstance(error, EngineNotStarted) and taken) or attempt == _PORT_ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    async def stop(self) -> int | None:
        """End the server and its whole process group; returns its exit code. Does nothing if it was not started."""
        process = self._process
        if process is None:
            return None
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), self.options.stop_grace_s)
        await self._kill()
        return process.returncode

    async def wait(self) -> int:
        """Wait for the server's own end; returns its exit code. Raises EngineNotStarted if it was not started."""
        if self._process is None:
            raise EngineNotStarted(self.base_url, "not started", str(self.options.log_path), "")
        return await self._process.wait()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def log_tail(self) -> str:
        """The last lines of the server's log."""
        try:
            with self.options.log_path.open(errors="replace") as log:
                return "".join(deque(log, maxlen=_LOG_TAIL_LINES)).rstrip()
        except OSError as error:
            return f"({error})"

    # --- inside -----------------------------------------------------------------------------------------------

    async def _check_python(self) -> None:
        """Raise EngineNotStarted, or EngineUnfit where the interpreter has an SGLang that is too old."""
        if shutil.which(self.options.python) is None:
            why = f"no interpreter {self.options.python}; install SGLang there first (deploy/sglang-cpu/install.sh)"
            raise EngineNotStarted(self.base_url, why, str(self.options.log_path), "")
        asking = await asyncio.create_subprocess_exec(
            self.options.python,
            "-Ic",
            "from importlib.metadata import version; print(version('sglang'))",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        said = (await asking.communicate())[0].decode(errors="replace").strip()
        # One that was not installed as a package says its version when it serves.
        if said:
            versions.check(said, str(self.options.python), counts_as=self.options.counts_as)

    async def _spawn(self) -> int:
        """Start the process; returns the size that the log had before."""
        log = await asyncio.to_thread(self._open_log)
        start = log.tell()
        try:
            self._process = await asyncio.create_subprocess_exec(
                self.options.python,
                "-c",
                _DIE_WITH_PARENT,
                str(os.getpid()),
                *arguments(self.options, self._port),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(self.options),
                start_new_session=True,  # a group of its own: a Ctrl-C at the terminal is the parent's to handle
            )
        finally:
            log.close()
        return start

    def _open_log(self) -> IO[bytes]:
        self.options.log_path.parent.mkdir(parents=True, exist_ok=True)
        return self.options.log_path.open("ab")

    def _log_from(self, start: int) -> str:
        with self.options.log_path.open("rb") as log:
            log.seek(start)
            return log.read().decode(errors="replace")

    async def _wait_ready(self, deadline: float) -> None:
        process = self._process
        assert process is not None  # noqa: S101 -- set by _spawn
        http = HttpConnection(self.base_url, reconnect_s=0)
        try:
            while time.monotonic() < deadline:
                if process.returncode is not None:
                    raise self._not_started(f"the server ended with exit code {process.returncode} before it was ready")
                # Not /health: it generates a token, for a second, and marks a server that is slow to answer unhealthy.
                with contextlib.suppress(EngineError):
                    reply = await http.call("GET", "/ready", doing="starting", deadline_s=2.0, repeatable=False)
                    # 404: it is too old to know the path, which its version will tell whoever connects it.
                    if reply.status in {200, 404}:
                        return
                await asyncio.sleep(_POLL_S)
        finally:
            await http.close()
        raise self._not_started(
            f"{self.base_url}/ready did not answer 200 within {self.options.ready_timeout_s:g} s of the start"
        )

    def _not_started(self, why: str) -> EngineNotStarted:
        return EngineNotStarted(self.base_url, why, str(self.options.log_path), self.log_tail())

    async def _kill(self) -> None:
        """Kill what is left of the process group (SIGKILL), and wait for the server itself."""
        process, self._process = self._process, None
        if process is None:
            return
        # The group outlives its leader while any of SGLang's children is left.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def free_port() -> int:
    """A loopback port that nothing listens on now. Raises OSError if all that were tried are taken."""
    for port in random.sample(_PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no free loopback port among 100 of {_PORTS.start} to {_PORTS.stop - 1}")
