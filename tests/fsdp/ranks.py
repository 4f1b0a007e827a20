"""Processes of one gloo group, on loopback, that are told what to run.

    with running_ranks(2, tmp_path) as ranks:
        zero, one = ranks.call("tests.fsdp.scenarios:publishes_files", directory=str(tmp_path))

A scenario is a function of its rank and the keywords; it returns what JSON can hold, or raises. The processes stay for
further calls, since torch takes seconds to import.
"""

import contextlib
import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

ANSWER_TIMEOUT_S = 200.0
GROUP_TIMEOUT_S = 150.0
_ROOT = Path(__file__).parents[2]
_MEASURABLE = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""glibc gives large blocks back at once, so that the peak of a process is what it used, not what malloc kept."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a scenario on one rank."""

    value: Any = None
    error: str = ""
    """Class of what it raised; "gone" when the process ended."""
    message: str = ""
    after_s: float = 0.0

    @property
    def result(self) -> Any:
        """The value, of a scenario that must not have failed."""
        assert not self.error, f"{self.error}: {self.message}"
        return self.value


class Ranks:
    """The processes of one group."""

    def __init__(self, world_size: int, folder: Path) -> None:
        rendezvous = folder / "rendezvous"
        self.log = folder / "ranks.log"
        with self.log.open("ab") as log:
            self.processes = [
                subprocess.Popen(
                    [sys.executable, "-m", "tests.fsdp.ranks", *map(str, (rank, world_size, rendezvous))],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=_ROOT,
                    env=os.environ | _MEASURABLE,
                )
                for rank in range(world_size)
            ]  # fmt: skip

    def call(self, scenario: str, **arguments: Any) -> list[Outcome]:
        """Run it on every rank, and wait for all of them."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps([scenario, arguments]) + "\n")
            process.stdin.flush()
        lines = [""] * len(self.processes)

        def read(rank: int) -> None:
            stream = self.processes[rank].stdout
            assert stream is not None
            lines[rank] = stream.readline()

        readers = [threading.Thread(target=read, args=(rank,), daemon=True) for rank in range(len(lines))]
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        for reader in readers:
            reader.start()
        for rank, reader in enumerate(readers):
            reader.join(max(0.0, deadline - time.monotonic()))
            assert not reader.is_alive(), f"rank {rank} did not answer to {scenario}; the log:\n{self.log.read_text()}"
        return [Outcome(**json.loads(line)) if line else Outcome(error="gone") for line in lines]

    def close(self) -> None:
        """Kill and reap them."""
        for process in self.processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]


@contextlib.contextmanager
def running_ranks(world_size: int, folder: Path) -> Iterator[Ranks]:
    """A group of processes, killed at the end."""
    ranks = Ranks(world_size, folder)
    try:
        yield ranks
    finally:
        ranks.close()


def serve(rank: int, world_size: int, rendezvous: str) -> None:
    """Join the group, and run what the lines of standard input name."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        scenario, arguments = json.loads(line)
        module, _, function = scenario.partition(":")
        began = time.monotonic()
        try:
            outcome: dict[str, Any] = {"value": getattr(importlib.import_module(module), function)(rank, **arguments)}
        except Exception as error:  # noqa: BLE001 - the test judges
            outcome = {"error": type(error).__name__, "message": str(error)}
        answers.write(json.dumps({**outcome, "after_s": time.monotonic() - began}) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
