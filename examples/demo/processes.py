"""The two other processes of an example, the buffer service and a rollout worker, as a user would start them.

Invariants: leaving the context ends both, also after an error, Ctrl-C or SIGTERM. A process that dies early is reported
with the end of its log.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 40.0
_LOG_TAIL_LINES = 25


class ProcessDied(RuntimeError):
    """A process of an example ended by itself."""


@dataclass(slots=True)
class Child:
    """A running process and where its log is."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def check(self) -> None:
        """Raise ProcessDied if it has ended."""
        if self.process.poll() is not None:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])
            raise ProcessDied(
                f"the {self.name} ended with status {self.process.returncode}; the end of {self.log}:\n{tail}"
            )

    def stop(self) -> None:
        """SIGTERM, and SIGKILL to its whole process group when that does not help."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


@contextmanager
def running(name: str, arguments: Sequence[str], log: Path) -> Iterator[Child]:
    """`rollout-buffer ARGUMENTS` in a process group of its own, its output in `log`."""
    program = Path(sys.executable).parent / "rollout-buffer"
    _leave_at_sigterm()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [str(program), *arguments], stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        )
    child = Child(name, process, log)
    try:
        yield child
    finally:
        child.stop()


def _leave_at_sigterm() -> None:
    """Have SIGTERM leave all contexts, where the program has no other use for it."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


@contextmanager
def service(directory: Path, *, durability: str = "process") -> Iterator[tuple[Child, str, str]]:
    """The buffer service on free ports with its data in `directory`: the process, its address, its admin URL."""
    note = directory / "service.json"
    note.unlink(missing_ok=True)
    arguments = ["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--data-dir", str(directory)]
    with running("buffer service", [*arguments, "--durability", durability], directory / "service.log") as child:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not note.exists():
            child.check()
            if time.monotonic() > deadline:
                raise ProcessDied(f"the buffer service did not start within {_START_TIMEOUT_S:.0f} s; see {child.log}")
            time.sleep(0.05)
        told = json.loads(note.read_text())
        yield child, told["address"], told["admin"]


@contextmanager
def worker(address: str, run_id: str, directory: Path, *flags: str) -> Iterator[Child]:
    """A rollout worker of the run, with its log and the weights that it fetches in `directory`.

    `flags`: what else it is told, as the rewards and the engine.
    """
    arguments = ["worker", "--address", address, "--run", run_id, "--weights-dir", str(directory / "fetched"), *flags]
    with running("rollout worker", arguments, directory / "worker.log") as child:
        yield child


def sglang(model: Path, python: Path, *flags: str) -> list[str]:
    """A worker's flags for an SGLang server of its own, in the environment of `python`. `flags`: the server's."""
    launch = ["--launch", str(model), "--sglang-python", str(python)]
    return [*launch, *(f"--engine-flag={flag}" for flag in flags)]
