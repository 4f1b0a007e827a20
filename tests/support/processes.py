"""Processes as the kernel sees them (Linux)."""

import contextlib
import os
import time
from pathlib import Path

GONE_TIMEOUT_S = 10.0


def children(pid: int) -> list[int]:
    """Pids of the children of a process, of all its threads; none for a process that is gone."""
    found: list[int] = []
    # Threads, and processes, end while they are looked at.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, (task / "children").read_text().split())
    return found


def command(pid: int) -> str:
    """Command line, empty for a process that is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def descendants(pid: int) -> list[int]:
    """Children, and theirs."""
    found = children(pid)
    for child in list(found):
        found += descendants(child)
    return found


def alive(pid: int) -> bool:
    """True for a process that runs; a zombie does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def until_gone(pids: list[int]) -> None:
    """Wait until none of them runs."""
    deadline = time.monotonic() + GONE_TIMEOUT_S
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, {pid: command(pid) for pid in left}
        time.sleep(0.02)
