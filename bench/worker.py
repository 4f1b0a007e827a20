"""A worker as users start it, for benches that need no reward."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout_workers.rewards import RewardInput

_DRAIN_TIMEOUT_S = 30


def no_reward(sample: RewardInput) -> float:
    """Nobody learns here."""
    return float(sample.sample_index)


@contextmanager
def worker(address: str, run_id: str, log: Path, *flags: str) -> Iterator[None]:
    """A worker of the run; `flags` name its engines. Drained at the end, killed if that takes too long."""
    program = Path(sys.executable).parent / "rollout-buffer"
    command = [
        *(str(program), "worker", "--run", run_id, "--address", address, "--reward", f"{__name__}:no_reward"),
        *flags,
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_DRAIN_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
