"""CPU and wall time of other processes, read from /proc, and the statistics of repeated runs."""

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pids: Sequence[int]) -> float:
    """User and system seconds of these processes so far (their threads included, their children not)."""
    return sum(sum(_ticks(pid)[:2]) for pid in pids) / _TICKS_PER_S


def tree_cpu_s(pid: int) -> float:
    """User and system seconds of a process and its descendants so far, those that have ended included."""
    total = 0
    for one in descendants(pid):
        with suppress(FileNotFoundError, ProcessLookupError):
            total += sum(_ticks(one))
    return total / _TICKS_PER_S


def _ticks(pid: int) -> list[int]:
    """Ticks of a process: user, system, and the same two of its children that it has waited for."""
    # The command name may hold spaces and brackets: the numbers follow the last one.
    numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return [int(number) for number in numbers[11:15]]


def descendants(pid: int) -> list[int]:
    """The process and all its descendants."""
    found = [pid]
    with suppress(FileNotFoundError, ProcessLookupError):  # It may end meanwhile.
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found.extend(descendants(int(child)))
    return found


def resident_bytes(pid: int, name: str = "VmRSS") -> int:
    """Resident memory of a process, in bytes: now (VmRSS), or the most since it was forgotten (VmHWM)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"process {pid} has no {name}")


def forget_peak(pid: int) -> None:
    """Have VmHWM of a process count from now on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


@dataclass(slots=True)
class Cost:
    """Cost of one measured section. `wall_s` in seconds, `cpu` seconds by name of the process group."""

    wall_s: float = 0.0
    cpu: dict[str, float] = field(default_factory=dict)


@contextmanager
def measured(groups: dict[str, Sequence[int]]) -> Iterator[Cost]:
    """Measure a section: wall time, and the CPU of each named group of processes."""
    cost = Cost()
    before = {name: cpu_s(pids) for name, pids in groups.items()}
    start = time.perf_counter()
    yield cost
    cost.wall_s = time.perf_counter() - start
    cost.cpu = {name: cpu_s(pids) - before[name] for name, pids in groups.items()}


def median(values: Sequence[float]) -> float:
    """The median, rounded to four significant digits for the report."""
    return float(f"{statistics.median(values):.4g}")
