"""Watch over what a service's processes hold while it is fuzzed or soaked: memory, descriptors, keys in its store; and
what its log says.
"""

import asyncio
import json
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.fuzz.verdicts import Failure, Verdicts
from tests.support.processes import command, descendants
from tests.support.service import ServiceProcess

SAMPLE_S = 1.0
GROWTH_BYTES = 48 << 20
"""That a process may grow by in the second half of the messages, by a straight line through its samples: of an
allocator that has not settled, not of a leak. A leak of 400 bytes a message is that much in 250,000 messages, one of
100 bytes in a million."""
SPARE_FILES = 8
"""Descriptors that may be open at the end and were not before: connections of this program's last calls."""
SETTLE_S = 60.0
LOG_BYTES_OF_A_MESSAGE = 40
"""On average: lines that anybody can cause are counted, not written one by one."""


class Watch:
    """One service from before the fuzz to after it."""

    def __init__(self, service: ServiceProcess, growth_bytes: int = GROWTH_BYTES) -> None:
        self._service = service
        self._growth_bytes = growth_bytes
        self._pids = self._processes()
        self._files = {pid: _files(pid) for pid in self._pids}
        self._keys = self._store_keys()
        self._log_from = service.log.stat().st_size
        self._beside: dict[int, str] = {}
        self._samples: list[dict[int, int]] = []
        self._sent: list[int] = []

    def beside(self, **pids: int) -> None:
        """Watch the memory of further processes, by their names; they may end before the service."""
        self._beside |= {pid: name for name, pid in pids.items()}

    async def sample(self, verdicts: Verdicts) -> None:
        """Wait until cancelled."""
        while True:
            self.take(verdicts.sent.total())
            await asyncio.sleep(SAMPLE_S)

    def take(self, sent: int) -> None:
        """Take a sample, when so many messages have been sent."""
        self._samples.append({pid: _resident(pid) for pid in (*self._pids, *self._beside)})
        self._sent.append(sent)

    async def check(self, verdicts: Verdicts, *, apart: float = 0.0) -> None:
        """Check a service whose clients have left and whose runs are deleted. `apart`: bytes by which the store has to
        have grown.
        """
        self._check_processes(verdicts)
        self._check_memory(verdicts, apart)
        self._check_log(verdicts)
        await _settled(lambda: not self._open_files(), "descriptors", self._open_files, verdicts)
        await _settled(lambda: not self._left_keys(), "keys of deleted runs", self._left_keys, verdicts)

    def grown(self) -> dict[str, float]:
        """MiB by which each process grew over the second half of the messages."""
        return {name: growth(values) / (1 << 20) for name, values in self._series(self._half())}

    def resident(self) -> dict[str, float]:
        """MiB of each process at the end."""
        return {name: values[-1] / (1 << 20) for name, values in self._series(self._samples)}

    def _series(self, samples: list[dict[int, int]]) -> Iterator[tuple[str, list[int]]]:
        """Bytes of each process while it was there."""
        for pid in (*self._pids, *self._beside):
            values = [sample[pid] for sample in samples if sample.get(pid)]
            if values:
                yield self._beside.get(pid) or _name(pid), values

    def _processes(self) -> list[int]:
        """Processes that last; simulations of runs come and go."""
        found = [self._service.pid, *descendants(self._service.pid)]
        return sorted(pid for pid in found if "observability.estimate" not in command(pid))

    def _check_processes(self, verdicts: Verdicts) -> None:
        now = self._processes()
        if now != self._pids:
            verdicts.fail(Failure(f"processes were {self._pids} and are {now}: one was restarted", "restart"))

    def _half(self) -> list[dict[int, int]]:
        middle = self._sent[-1] / 2
        return [sample for sample, sent in zip(self._samples, self._sent, strict=True) if sent >= middle]

    def _check_memory(self, verdicts: Verdicts, apart: float) -> None:
        for name, grown in self.grown().items():
            if grown > (self._growth_bytes + (apart if name.startswith("store") else 0)) / (1 << 20):
                verdicts.fail(
                    Failure(f"{name} grew by {grown:.0f} MiB over the second half of the messages", f"memory {name}")
                )

    def _check_log(self, verdicts: Verdicts) -> None:
        with self._service.log.open("rb") as log:
            log.seek(self._log_from)
            written = log.read()
        for line in written.decode("utf-8", "replace").splitlines():
            bad = _bad(line)
            if bad:
                verdicts.fail(Failure(f"the log says: {line[:6_000]}", f"log {bad}"))
        allowed = 100_000 + LOG_BYTES_OF_A_MESSAGE * verdicts.sent.total()
        if len(written) > allowed:
            verdicts.fail(Failure(f"the log has {len(written)} bytes for {verdicts.sent.total()} messages", "log size"))

    def _open_files(self) -> list[str]:
        return [
            f"{_name(pid)} had {before} open and has {now}"
            for pid, before in self._files.items()
            if (now := _files(pid)) > before + SPARE_FILES
        ]

    def _left_keys(self) -> list[str]:
        return sorted(self._store_keys() - self._keys)[:20]

    def _store_keys(self) -> set[str]:
        return set(_keys(next(self._service.data_dir.rglob("*.sock"))))


async def _settled(settled: object, what: str, left: object, verdicts: Verdicts) -> None:
    """Wait a while for what ends by itself."""
    assert callable(settled)
    assert callable(left)
    deadline = asyncio.get_running_loop().time() + SETTLE_S
    while not settled():
        if asyncio.get_running_loop().time() > deadline:
            verdicts.fail(Failure(f"{what} are left: {left()}", what))
            return
        await asyncio.sleep(0.5)


def _bad(line: str) -> str:
    """Name the kind of line that must not be in a log, empty for others."""
    try:
        said = json.loads(line)
    except ValueError:
        return "traceback" if "Traceback" in line or "Error" in line else ""
    if not isinstance(said, dict):
        return ""
    if said.get("level") in ("error", "critical") or "exception" in said:
        return f"{said.get('event')} {str(said.get('exception'))[-120:]}"
    return ""


def growth(values: list[int]) -> float:
    """Return the growth of the straight line through the values, from first to last."""
    count = len(values)
    if count < 2:
        return 0.0
    mean_x, mean_y = (count - 1) / 2, sum(values) / count
    slope = sum((x - mean_x) * (y - mean_y) for x, y in enumerate(values)) / sum(
        (x - mean_x) ** 2 for x in range(count)
    )
    return slope * (count - 1)


def _name(pid: int) -> str:
    text = command(pid)
    kind = "rpc process" if "buffer_service.app" in text else "supervisor" if "buffer_cli" in text else "store"
    return f"{kind} {pid}"


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _files(pid: int) -> int:
    try:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except FileNotFoundError:
        return 0


def _keys(path: Path) -> Iterable[str]:
    with socket.socket(socket.AF_UNIX) as store:
        store.connect(str(path))
        store.sendall(b"KEYS *\r\nECHO end-of-keys\r\n")
        reply = b""
        while not reply.endswith(b"end-of-keys\r\n"):
            reply += store.recv(1 << 20)
    # An array of bulk strings, and the echo.
    return [line.decode("utf-8", "replace") for line in reply.split(b"\r\n")[2:-3:2]]
