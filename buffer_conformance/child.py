"""Processes that the kit starts: the candidate, and a service of its own. None outlives the kit's `async with`."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from buffer_wire.connection.access import ENVIRONMENT

START_S = 60.0
STOP_S = 20.0
_TAIL = 2_000


class DidNotStart(Exception):
    """A process that the kit needs does not run; the message says why."""


class Child:
    """A command that runs in a session of its own; `log` holds what it prints."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self.log = log

    @classmethod
    async def start(cls, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> "Child":
        """Start the process. Raises DidNotStart."""
        with log.open("ab") as out:
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    # What the kit gets in with is not for the proxy, which is all that a candidate sees.
                    env={**{name: v for name, v in os.environ.items() if name not in ENVIRONMENT}, **(env or {})},
                    start_new_session=True,
                )
            except OSError as error:
                raise DidNotStart(f"{command[0]} cannot be started: {error}") from error
        return cls(process, log)

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process; None while it runs."""
        return self._process.returncode

    def terminate(self) -> None:
        """Send SIGTERM to the process that was started, and to it alone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    async def ended(self, within_s: float) -> int | None:
        """The exit code; None when it still runs after `within_s`."""
        try:
            async with asyncio.timeout(within_s):
                return await self._process.wait()
        except TimeoutError:
            return None

    async def kill(self) -> None:
        """End the process and the processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    def tail(self) -> str:
        """The end of the output of the process."""
        return self.log.read_text(errors="replace")[-_TAIL:]


@contextlib.asynccontextmanager
async def service_at(address: str | None) -> AsyncIterator[str]:
    """The address of the service: the one given, or that of one started here, which ends with the block."""
    if address is not None:
        yield address
        return
    with tempfile.TemporaryDirectory(prefix="rollout-buffer-conformance-") as folder:
        data = Path(folder)
        command = [sys.executable, "-m", "buffer_cli", "serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
        command += ["--data-dir", str(data), "--rpc-processes", "1", "--durability", "memory"]
        child = await Child.start(command, data / "service.log")
        try:
            yield await _served(child, data / "service.json")
        finally:
            child.terminate()
            if await child.ended(STOP_S) is None:
                await child.kill()


async def _served(child: Child, state: Path) -> str:
    deadline = time.monotonic() + START_S
    while (address := _address(state)) is None:
        if child.exit_code is not None or time.monotonic() > deadline:
            raise DidNotStart(f"the service does not start:\n{child.tail()}")
        await asyncio.sleep(0.05)
    return address


def _address(state: Path) -> str | None:
    """Address that a service writes to its state file once it serves; None before."""
    return str(json.loads(state.read_text())["address"]) if state.exists() else None
