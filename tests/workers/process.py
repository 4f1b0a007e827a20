"""A worker as a process of its own: `rollout-buffer worker` with simulated or real engines."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.workers.building import REWARD

STOP_TIMEOUT_S = 40.0
PROGRAM = (sys.executable, "-m", "buffer_cli", "worker")


class WorkerProcess:
    """Started when it is made; `log` holds what it printed."""

    def __init__(
        self,
        address: str,
        run_id: str,
        folder: Path,
        *flags: str,
        worker_id: str = "w",
        within: Sequence[str] = (),
        program: Sequence[str] = PROGRAM,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"{worker_id}.log"
        command = [
            *within, *program, "--address", address, "--run", run_id,
            "--reward", REWARD,
            "--worker-id", worker_id, "--weights-dir", str(folder / "weights"), "--progress-every-s", "2", *flags,
        ]  # fmt: skip
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, "NO_COLOR": "1"}
            )

    def stop(self) -> int:
        """SIGTERM, and wait; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_TIMEOUT_S)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()

    def said(self) -> str:
        """Everything logged so far."""
        return self.log.read_text()


@contextlib.contextmanager
def worker_process(
    address: str,
    run_id: str,
    folder: Path,
    *flags: str,
    worker_id: str = "w",
    within: Sequence[str] = (),
    program: Sequence[str] = PROGRAM,
) -> Iterator[WorkerProcess]:
    """A running worker; its log is printed when the test fails. `within`: a command that the worker's is the end of.
    `program`: one that takes the worker's options, in its place.
    """
    worker = WorkerProcess(address, run_id, folder, *flags, worker_id=worker_id, within=within, program=program)
    try:
        yield worker
    except BaseException:
        print(worker.said())
        raise
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.stop()
        if worker.process.poll() is None:
            worker.kill()
