"""`python -m examples.fsdp`: four ranks train one model with FSDP2 from the buffer, on this machine's CPU.

The service is real, the ranks are processes that talk through gloo on loopback, the engine is simulated: it writes
random tokens in responses of long-tailed lengths, so nothing is learned, and everything else is as with a real one.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from examples.demo.processes import Child, service, worker
from examples.fsdp.tasks import MAX_NEW_TOKENS, VOCAB_SIZE

RUN_ID = "fsdp"
_POLL_EVERY_S = 0.1
_OTHERS_S = 60.0
"""Time that the other ranks have to end by themselves when one has failed."""
LENGTHS = ("--length-median", "32", "--length-sigma", "1.0")
"""A response in six is longer than 87 tokens, one in fifty longer than 250."""


def worker_flags() -> list[str]:
    """The worker's flags, with one simulated engine."""
    return [
        *("--reward", "examples.fsdp.tasks:reward", "--groups-per-engine", "48"),
        *("--simulate", "--vocab-size", str(VOCAB_SIZE), "--slots", str(MAX_NEW_TOKENS), "--tokens-per-s", "1000"),
        *LENGTHS,
    ]


@contextlib.contextmanager
def started_ranks(world_size: int, out: Path, trainer: list[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The ranks' processes, killed at the end if they still run; rank 0 prints here, the others into their logs."""
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(world_size):
            log = None if rank == 0 else stack.enter_context((out / f"rank{rank}.log").open("ab"))
            environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen([sys.executable, "-m", *trainer], stdout=log, stderr=log, env=environment)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        yield processes


def wait(processes: list[subprocess.Popen[bytes]], *children: Child) -> int:
    """Wait until all have ended; 0 if all did well. After a failure the others have a minute to end by themselves."""
    deadline = float("inf")
    while (states := [process.poll() for process in processes]).count(None) and time.monotonic() < deadline:
        for child in children:
            child.check()
        if any(states) and deadline == float("inf"):
            deadline = time.monotonic() + _OTHERS_S
        time.sleep(_POLL_EVERY_S)
    for rank, status in enumerate(process.poll() for process in processes):
        if status != 0:
            print(f"rank {rank}: {'still runs' if status is None else f'ended with status {status}'}", file=sys.stderr)
    return int(any(process.poll() != 0 for process in processes))


def main(argv: list[str] | None = None) -> int:
    """Start everything and train; 0 when every rank did."""
    parser = argparse.ArgumentParser(prog="python -m examples.fsdp", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10, help="steps in all (default 10)")
    parser.add_argument("--ranks", type=int, default=4, help="trainer processes (default 4)")
    parser.add_argument("--out", type=Path, help="kept folder, from whose last checkpoint a later start goes on")
    options = parser.parse_args(argv)
    if options.steps < 1 or options.ranks < 1:
        parser.error("--steps and --ranks must be at least 1")
    with contextlib.ExitStack() as stack:
        if options.out is None:
            out = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fsdp-")))
        else:
            out = options.out.resolve()
            out.mkdir(parents=True, exist_ok=True)
        buffer, address, admin = stack.enter_context(service(out / "service"))
        started_worker = stack.enter_context(worker(address, RUN_ID, out, *worker_flags()))
        print(f"{options.ranks} ranks; service at {address}, its page at {admin}/", flush=True)
        meeting = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fsdp-meeting-"))) / "ranks"
        trainer = ["examples.fsdp.trainer", "--address", address, "--out", str(out), "--steps", str(options.steps)]
        ranks = stack.enter_context(started_ranks(options.ranks, out, [*trainer, "--rendezvous", str(meeting)]))
        return wait(ranks, buffer, started_worker)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; every process was stopped")
