"""A worker as users start it, for benches that need no reward."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout_workers.rewards import RewardInput

_DRAIN_TIMEOUT_S = 30
_SHOWN_LINES = 20


def no_reward(sample: RewardInput) -> float:
    """Nobody learns here."""
    return float(sample.sample_index)


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:])


@contextmanager
def worker(address: str, run_id: str, log: Path, *flags: str) -> Iterator[int]:
    """A worker of the run, by its process id; `flags` name its engines. Drained at the end, killed if that takes too
    long. An error of the measurement shows the end of the worker's log.
    """
    program = Path(sys.executable).parent / "rollout-buffer"
    command = [
        *(str(program), "worker", "--run", run_id, "--address", address, "--reward", f"{__name__}:no_reward"),
        *flags,
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield process.pid
        except BaseException:
            print(f"the end of {log}:\n{_end_of(log)}", file=sys.stderr)
            raise
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_DRAIN_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
