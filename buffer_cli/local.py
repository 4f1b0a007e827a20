"""A whole loop in one process tree, for a first look and for notebooks: the service as a child, the worker as a thread.

Invariants: leaving the context ends both, also after an error or Ctrl-C. The service ends with this process, however
that dies. What did not start, or ended by itself, is named with its log's end.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from buffer_wire.errors import InvalidField
from rollout_workers.counters import describe
from rollout_workers.engine.options import LaunchOptions, SimulatedOptions
from rollout_workers.options import WorkerOptions
from rollout_workers.rewards import RewardFunction
from rollout_workers.worker import Worker
from trainer_client import BufferClient, Policy, Task, TrainerSession

START_S, STOP_S, POLL_S = 60.0, 15.0, 0.05
LOG_LINES = 15

# Runs in the child before the service: it asks the kernel for SIGTERM when its parent ends (prctl 1 is
# PR_SET_PDEATHSIG), notices a parent that ended before that, and becomes the service.
_ENDS_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that started the service is gone")
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


class LocalFailed(RuntimeError):
    """Part of a local loop that did not start, or ended by itself; the message names it."""


@dataclass(frozen=True, slots=True)
class Local:
    """A service and a worker that run beside this thread."""

    client: BufferClient
    address: str
    """host:port of the service."""
    page: str
    """URL of the service's page."""
    run_id: str

    def session(
        self,
        tasks: Iterable[Task],
        *,
        policy: Policy | None = None,
        **options: Any,  # noqa: ANN401 - of BufferClient.session
    ) -> AbstractContextManager[TrainerSession]:
        """Open a training loop, for a `with`; `options` as BufferClient.session takes them. Without a `policy` batches
        have 8 groups, and one at most is generated ahead.
        """
        policy = policy or Policy(batch_groups=8, overflow_action="block", max_lookahead=1)
        return self.client.session(self.run_id, policy=policy, tasks=tasks, **options)


@contextmanager
def local(
    reward: RewardFunction | str,
    *,
    engine: SimulatedOptions | LaunchOptions | None = None,
    run_id: str = "local",
    data_dir: Path | None = None,
) -> Iterator[Local]:
    """A service and a rollout worker for this process alone, until the `with` ends.

    `reward`: a function at the top of a module, a script or a notebook, or its name, `module:function`. `engine`:
    None: simulated. `data_dir`: where data and logs stay; None: they are deleted. Raises InvalidField, LocalFailed.
    """
    engine = engine or SimulatedOptions()
    with ExitStack() as stack:
        folder = data_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollout-buffer-")))
        service = stack.enter_context(_service(folder / "service"))
        address = service["address"]
        worker = WorkerOptions(
            address=address,
            run_id=run_id,
            reward=reward if isinstance(reward, str) else _name_of(reward),
            weights_dir=folder / "weights",
            drain_grace_s=5.0,
            progress_every_s=0,
            simulated=engine if isinstance(engine, SimulatedOptions) else None,
            launch=engine if isinstance(engine, LaunchOptions) else None,
        )
        client = stack.enter_context(BufferClient(address))
        running = stack.enter_context(_worker(worker, folder / "worker.log", client.close))
        try:
            yield Local(client, address, f"http://{service['admin']}", run_id)
        except Exception as error:
            if running.failure is None:
                raise
            # The client was closed, or the loop would wait for groups that nobody makes.
            raise LocalFailed(f"the worker ended: {describe(running.failure)}") from error


def _name_of(function: Callable[..., Any]) -> str:
    """The name by which the worker imports the function. Raises InvalidField."""
    name = f"{function.__module__}:{getattr(function, '__qualname__', '')}"
    if "<" in name or name.endswith(":"):
        raise InvalidField("reward", name, "a function at the top of a module, a script or a notebook")
    return name


# --- the service ----------------------------------------------------------------------------------------------


@contextmanager
def _service(folder: Path) -> Iterator[dict[str, str]]:
    """A service on free ports, with what it says of itself. Raises LocalFailed."""
    folder.mkdir(parents=True, exist_ok=True)
    note, log = folder / "service.json", folder.with_suffix(".log")
    note.unlink(missing_ok=True)
    serve = ["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--data-dir", str(folder)]
    with log.open("wb") as sink:
        process = subprocess.Popen(  # noqa: S603 - this project's own program
            [sys.executable, "-c", _ENDS_WITH_PARENT, str(os.getpid()), "-m", "buffer_cli", *serve],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            # Ctrl-C is for the program; the service ends when the program has left its loop.
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_S
        while not note.exists():
            if process.poll() is not None:
                raise LocalFailed(f"the service did not start (status {process.returncode}): {_end_of(log)}")
            if time.monotonic() > deadline:
                raise LocalFailed(f"the service did not start within {START_S:.0f} s: {_end_of(log)}")
            time.sleep(POLL_S)
        yield json.loads(note.read_text())
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])


# --- the worker -----------------------------------------------------------------------------------------------


class _Running(threading.Thread):
    """A worker with an event loop of its own. `failure`: what ended it, None while it runs and after `stop`."""

    def __init__(self, options: WorkerOptions, on_failure: Callable[[], None]) -> None:
        super().__init__(name="rollout-worker", daemon=True)
        self.failure: BaseException | None = None
        self.made: Future[Worker] = Future()
        """The worker, or why there is none."""
        self._options = options
        self._on_failure = on_failure
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None

    def run(self) -> None:
        """Work until `stop`."""
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._work())
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # noqa: BLE001 - a thread has nobody to raise to
            self.failure = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
            self._on_failure()

    async def _work(self) -> None:
        self._task = asyncio.current_task()
        try:
            worker = Worker(self._options)
        except BaseException as error:  # noqa: BLE001 - whoever started the thread is told
            self.made.set_exception(error)
            raise asyncio.CancelledError from None
        self.made.set_result(worker)
        await worker.run()

    def stop(self) -> None:
        """Drain, and end it where that takes longer than STOP_S."""
        for act in (self.made.result().stop, self._task.cancel if self._task else self._loop.stop):
            if self.is_alive():
                self._loop.call_soon_threadsafe(act)
                self.join(STOP_S)


@contextmanager
def _worker(options: WorkerOptions, log: Path, on_failure: Callable[[], None]) -> Iterator[_Running]:
    """A worker beside this thread, which logs to a file unless this process has a use of structlog of its own.

    Raises InvalidField, LocalFailed.
    """
    with log.open("a") as sink:
        mine = not structlog.is_configured()
        if mine:
            structlog.configure(logger_factory=structlog.WriteLoggerFactory(sink))
        running = _Running(options, on_failure)
        running.start()
        try:
            running.made.result(START_S)
            yield running
        except NotYet:
            raise LocalFailed(f"the worker did not start within {START_S:.0f} s: {_end_of(log)}") from None
        finally:
            if running.made.done() and not running.made.exception():
                running.stop()
            if mine:
                structlog.reset_defaults()
