"""The rpc processes: started, kept running, drained.

Invariant: a process that dies is started again on the same address, after a back-off that doubles while it keeps dying
young. After `drain` none is started any more.
"""

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import replace

import structlog

from buffer_service.app.assignment import READY, Assignment
from buffer_service.observability.shared_values import SharedMetrics
from buffer_service.supervisor.stopping import Stopped, unless

log = structlog.get_logger(__name__)

FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.1, 5.0
YOUNG_S = 10.0
START_TIMEOUT_S = 60.0
KILL_AFTER_S = 5.0


class StartFailed(RuntimeError):
    """An rpc process could not be made, or it ended, or said nothing, before it served.

    Where it wrote something on standard error, which is the service's own, that says why.
    """


class RpcProcesses:
    """Processes that serve RPCs, one for each memory for metrics, with the same assignment."""

    def __init__(self, assignment: Assignment, metrics: SharedMetrics) -> None:
        self._assignment = assignment
        self._metrics = metrics
        self._processes: list[Process | None] = [None] * len(metrics.memories)
        self._draining = asyncio.Event()

    @property
    def pids(self) -> list[int]:
        """Pids of the processes that serve."""
        return [process.pid for process in self._processes if process is not None and process.returncode is None]

    @property
    def all_up(self) -> bool:
        """True when every process serves."""
        return len(self.pids) == len(self._processes)

    async def start(self) -> None:
        """Start all. Raises StartFailed; then, and where it is cancelled, none is left."""
        slots = range(len(self._processes))
        failures: list[BaseException] = []
        try:
            ends = await asyncio.gather(*(self._fill(slot) for slot in slots), return_exceptions=True)
            failures = [end for end in ends if end is not None]
        finally:
            if not self.all_up:
                await self.drain(0.0)
        if failures:
            raise failures[0]

    async def keep_running(self) -> None:
        """Restart processes that die, until drained."""
        async with asyncio.TaskGroup() as tasks:
            for slot in range(len(self._processes)):
                tasks.create_task(self._keep(slot))

    async def drain(self, grace_s: float) -> None:
        """Send SIGTERM to all processes, and SIGKILL to those that outlive the grace."""
        self._draining.set()
        living = [process for process in self._processes if process is not None and process.returncode is None]
        for process in living:
            process.terminate()
        try:
            async with asyncio.timeout(grace_s + KILL_AFTER_S):
                await asyncio.gather(*(process.wait() for process in living))
        except TimeoutError:
            for process in living:
                if process.returncode is None:
                    log.warning("rpc process outlived its grace", pid=process.pid, grace_s=grace_s)
                    process.kill()
                    await process.wait()

    async def _fill(self, slot: int) -> None:
        self._processes[slot] = await self._start(slot)

    async def _spawn(self, memory: int) -> Process:
        try:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                # Without the working directory on the path: a file there must not stand in for a package.
                "-P",
                "-m",
                "buffer_service.app",
                stdin=PIPE,
                stdout=PIPE,
                pass_fds=(memory,),
            )
        except OSError as error:
            # The host is short of processes, memory or descriptors, which passes.
            raise StartFailed(f"an rpc process cannot be made: {error}") from error

    async def _start(self, slot: int) -> Process:
        memory = self._metrics.memories[slot]
        process = await self._spawn(memory)
        if process.stdin is None or process.stdout is None:
            raise StartFailed("an rpc process has no pipes")
        try:
            process.stdin.write(replace(self._assignment, metrics=memory).to_json())
            await process.stdin.drain()
            async with asyncio.timeout(START_TIMEOUT_S):
                word = await process.stdout.readline()
        except (TimeoutError, ConnectionError):
            word = b""
        except BaseException:
            process.kill()
            await process.wait()
            raise
        if word != READY:
            if process.returncode is None:
                process.kill()
            status = await process.wait()
            raise StartFailed(f"an rpc process ended before it served ({_named(status)}); standard error says why")
        return process

    async def _keep(self, slot: int) -> None:
        backoff_s = FIRST_BACKOFF_S
        loop = asyncio.get_running_loop()
        while not self._draining.is_set():
            process = self._processes[slot]
            if process is not None:
                born = loop.time()
                status = await process.wait()
                self._metrics.ended(self._metrics.memories[slot])
                if self._draining.is_set():
                    return
                log.warning("rpc process died", pid=process.pid, status=_named(status))
                self._processes[slot] = None
                backoff_s = FIRST_BACKOFF_S if loop.time() - born > YOUNG_S else backoff_s
            try:
                async with asyncio.timeout(backoff_s):
                    await self._draining.wait()
                return
            except TimeoutError:
                backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
            try:
                started = await unless(self._draining, self._start(slot))
            except Stopped:
                return
            except StartFailed as failure:
                log.warning("rpc process does not start", why=str(failure))
                continue
            self._processes[slot] = started
            if self._draining.is_set():
                # The drain did not see it.
                started.kill()
                await started.wait()


def _named(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"
