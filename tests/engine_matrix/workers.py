"""Worker processes as these tests run them: on given servers, away from the trainer's folder, their log in JSON.

What a worker counted is read from the line that it logs at its end, or from its progress lines.
"""

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.mortal import mortal
from tests.workers.building import REWARD

STOP_TIMEOUT_S = 60.0
GRACE_S = 20.0

_HIDE = 'mount -t tmpfs hidden "$0" && exec "$@"'


@functools.cache
def hiding() -> tuple[str, ...]:
    """The start of a command whose process cannot see a folder; empty where the kernel lets nobody do that."""
    unshare = shutil.which("unshare")
    for flags in (("-m",), ("-r", "-m")) if unshare else ():
        command = [str(unshare), *flags, "sh", "-c", _HIDE]
        if subprocess.run([*command, "/mnt", "true"], check=False, capture_output=True, timeout=10).returncode == 0:
            return tuple(command)
    return ()


class Worker:
    """One `rollout-buffer worker`, started when it is made. `hidden`: a folder that it must not see."""

    def __init__(
        self, address: str, run_id: str, folder: Path, *flags: str, worker_id: str, hidden: Path | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.worker_id = worker_id
        self.log = folder / f"{worker_id}.log"
        command = [
            sys.executable, "-m", "buffer_cli", "worker", "--address", address, "--run", run_id, "--reward", REWARD,
            "--worker-id", worker_id, "--weights-dir", str(folder / "weights"), "--progress-every-s", "1",
            "--drain-grace-s", str(GRACE_S), *flags,
        ]  # fmt: skip
        if hidden is not None and hiding():
            command = [*hiding(), str(hidden), *command]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                mortal(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "NO_COLOR": "1", "RB_LOG_FORMAT": "json", "RB_LOG_LEVEL": "info"},
            )

    def sees(self, folder: Path) -> list[Path]:
        """Tell what the process finds in a folder. For one that was hidden and could be: nothing."""
        return list((Path(f"/proc/{self.process.pid}/root") / folder.relative_to("/")).iterdir())

    def stop(self) -> int:
        """SIGTERM, and wait until it has drained; returns the exit code."""
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

    def events(self, name: str) -> list[dict[str, Any]]:
        """Its log lines of this event."""
        lines = (json.loads(line) for line in self.said().splitlines() if line.startswith("{"))
        return [line for line in lines if line.get("event") == name]

    def last_words(self) -> dict[str, Any]:
        """Return what it said of itself when it ended in good order."""
        ends = self.events("worker ends")
        assert ends, f"it did not end in good order:\n{self.said()[-4000:]}"
        return ends[-1]


@contextlib.contextmanager
def worker(
    address: str, run_id: str, folder: Path, *flags: str, worker_id: str, hidden: Path | None = None
) -> Iterator[Worker]:
    """A running worker, ended whatever happens; the end of its log is printed when the test fails."""
    running = Worker(address, run_id, folder, *flags, worker_id=worker_id, hidden=hidden)
    try:
        yield running
    except BaseException:
        print(f"--- end of the log of worker {worker_id}\n{running.said()[-6000:]}")
        raise
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.stop()
        if running.process.poll() is None:
            running.kill()
