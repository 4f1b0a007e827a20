"""Processes for reward functions that compute: one sample at a time in each, started when they are first needed.

A function that hangs past its timeout, or takes its process with it, costs the sample that it was called with and no
other: the process, with everything that it started, is killed and replaced. Samples and what is given for them travel
as JSON and arrays: nothing is unpickled. Invariants: at most `count` processes live; none outlives `close`, nor this
process.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys

import structlog

from rollout_workers.errors import RewardFailed
from rollout_workers.generation.columns.given import Returned, from_message
from rollout_workers.reward_inputs import RewardInput, to_message
from rollout_workers.rewarding.child import FRAME

START_TIMEOUT_S = 120.0
"""Longest time for a process to start and to import the function."""

_END_S = 5.0
_log = structlog.get_logger()


class _Gone(Exception):
    """The process has ended, or cannot do its work."""


class _Child:
    """Process that calls the reward function, started."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls) -> "_Child":
        """Start a process. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "rollout_workers.rewarding.child",
                str(theirs.fileno()),
                str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)},
                start_new_session=True,
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return cls(process, reader, writer)

    async def load(self, function: str) -> None:
        """Have it import the function. Raises _Gone."""
        answer, _ = await self.ask(json.dumps({"function": function, "path": sys.path}).encode(), b"")
        if "error" in answer:
            raise _Gone(f"its process cannot load it: {answer['error']}")

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    async def ask(self, head: bytes, ids: bytes) -> tuple[dict[str, object], bytes]:
        """Send one request; returns the answer, and the bytes behind it. Raises _Gone."""
        try:
            self._writer.writelines([FRAME.pack(len(head), len(ids)), head, ids])
            await self._writer.drain()
            size, more = FRAME.unpack(await self._reader.readexactly(FRAME.size))
            answer: dict[str, object] = json.loads(await self._reader.readexactly(size))
            data = await self._reader.readexactly(more)
        except (asyncio.IncompleteReadError, OSError):
            raise _Gone(f"its process {await self._verdict()}") from None
        return answer, data

    def kill(self) -> None:
        """End the process and what it has started."""
        self._writer.close()
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def _verdict(self) -> str:
        try:
            async with asyncio.timeout(_END_S):
                code = await self.process.wait()
        except TimeoutError:
            return "closed its connection"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


class RewardProcesses:
    """Up to `count` processes that call the function `module:function`. `timeout_s`: longest time for one sample."""

    def __init__(self, function: str, *, count: int, timeout_s: float) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._free: asyncio.LifoQueue[_Child | None] = asyncio.LifoQueue()
        for _ in range(count):
            self._free.put_nowait(None)
        self._children: set[_Child] = set()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that live."""
        return [child.process.pid for child in self._children if child.alive]

    async def ask(self, sample: RewardInput, *, timeout_s: float | None = None) -> Returned:
        """Ask for what the reward function returns for the sample, within `timeout_s` or else the time of all. Raises
        RewardFailed.
        """
        left_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            head, ids = to_message(sample)
        except (TypeError, ValueError) as error:
            raise self._failed(sample, f"the sample cannot be sent to its process: {error}") from error
        child = await self._free.get()
        try:
            child = await self._ready(child)
            async with asyncio.timeout(left_s):
                answer, data = await child.ask(head, ids)
        except TimeoutError:
            self._end(child)
            child = None
            why = f"no result within {left_s:g} s; its process was killed"
            raise self._failed(sample, why) from None
        except (_Gone, OSError) as error:
            self._end(child)
            child = None
            raise self._failed(sample, str(error)) from None
        except BaseException:
            # It may still be at work, and would answer the next one's question.
            self._end(child)
            child = None
            raise
        finally:
            self._free.put_nowait(child)
        if "error" in answer:
            retry_after_s = float(str(answer.get("retry_after_s", 0.0)))
            raise RewardFailed(self._function, sample.sample_index, str(answer["error"]), retry_after_s=retry_after_s)
        return from_message(answer, data)

    async def close(self) -> None:
        """Kill the processes, and see them gone."""
        self._closed = True
        for child in self._children:
            child.kill()
        waiting = [asyncio.ensure_future(child.process.wait()) for child in self._children]
        if waiting:
            await asyncio.wait(waiting, timeout=_END_S)
        self._children.clear()

    async def _ready(self, child: _Child | None) -> _Child:
        """A process that can be asked. Raises _Gone, OSError."""
        if self._closed:
            raise _Gone("the worker is ending")
        if child is not None and child.alive:
            return child
        self._children = {known for known in self._children if known.alive}
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                started = await _Child.start()
                self._children.add(started)
                try:
                    await started.load(self._function)
                except BaseException:
                    started.kill()
                    raise
        except TimeoutError:
            raise _Gone(f"its process did not load it within {START_TIMEOUT_S:g} s") from None
        _log.info("reward process started", function=self._function, pid=started.process.pid)
        return started

    def _end(self, child: _Child | None) -> None:
        if child is not None:
            _log.warning("reward process ended", function=self._function, pid=child.process.pid)
            child.kill()

    def _failed(self, sample: RewardInput, why: str) -> RewardFailed:
        return RewardFailed(self._function, sample.sample_index, why)
