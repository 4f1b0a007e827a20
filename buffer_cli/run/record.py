"""`rollout-buffer run record`: writes a run's recording to Parquet, once or for as long as the run lives.

Invariant: an export that reached the end compares its rows of groups with the run's ledger, and says what is missing or
too much. The store keeps the newest million events, and tells nobody which went.
"""

import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from buffer_cli.calls import Calls, calling
from buffer_cli.exits import EXIT_OPTIONS
from buffer_cli.options import CallOptions
from buffer_wire.errors import RolloutBufferError
from rollout_buffer.v1 import runs_pb2

if TYPE_CHECKING:
    from buffer_cli.run.recording import Recording

ROWS_PER_FILE = 50_000
BYTES_PER_FILE = 64 << 20
"""Bytes of messages; files are written when either bound is reached, or at the end of the recording."""
EVERY_S = 5.0


def record(name: str, folder: Path, service: CallOptions, *, groups: bool, follow: bool) -> int:
    """Export to the end of what is there, with `follow` again and again until SIGTERM or Ctrl-C; returns the exit code.

    With `follow`, a service that is away and a disk that is full are waited for: once tries have failed for
    `timeout_s`, one more ends it. What no wait cures ends it at once.
    """
    try:
        from buffer_cli.run.recording import Recording  # noqa: PLC0415 - pyarrow is an extra
    except ModuleNotFoundError as error:
        if error.name != "pyarrow":
            raise
        sys.stderr.write("run record writes Parquet, for which pyarrow has to be installed: the extra `record`\n")
        return EXIT_OPTIONS
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        recording = Recording(folder, name, whole=groups)
        comparison = _Comparison()
        with calling(Calls, service) as calls:
            _remark(calls.get(name).run)
            give_up_at: float | None = None
            while True:
                try:
                    before = calls.get(name).run
                    recording.check_run(before.created_ms)
                    _export(calls, name, recording, whole=groups, stop=stop)
                    if not stop.is_set():
                        comparison.tell(recording.groups, before, calls.get(name).run)
                    give_up_at = None
                except (OSError, RolloutBufferError) as error:
                    if not (follow and (isinstance(error, OSError) or error.retryable)):
                        raise
                    now = time.monotonic()
                    give_up_at = now + service.timeout_s if give_up_at is None else give_up_at
                    if now >= give_up_at:
                        raise
                    sys.stderr.write(f"waiting: {error}\n")
                ended = not follow or stop.is_set()
                _say(recording, folder, last=ended)
                if ended:
                    return 0
                stop.wait(EVERY_S)
    except (OSError, ValueError, RolloutBufferError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


def _export(calls: Calls, run_id: str, recording: "Recording", *, whole: bool, stop: threading.Event) -> None:
    """Write everything that is there now; what was written until an error stays."""
    rows, rows_bytes = list[runs_pb2.Record](), 0
    with calls.export(run_id, recording.after, include_groups=whole) as messages:
        for message in messages:
            rows.extend(message.records)
            rows_bytes += message.ByteSize()
            if len(rows) >= ROWS_PER_FILE or rows_bytes >= BYTES_PER_FILE:
                recording.append(rows)
                rows, rows_bytes = [], 0
            if stop.is_set():
                break
    recording.append(rows)


def _remark(run: runs_pb2.Run) -> None:
    if not run.policy.record_groups:
        sys.stderr.write(
            f"run {run.run_id!r} keeps no events at present; switch it on with: "
            f"rollout-buffer run policy {run.run_id} --set record_groups=true\n"
        )


class _Comparison:
    """Differences of the folder from the run's ledger. Each one is said when it has grown."""

    def __init__(self) -> None:
        self._missing = self._extra = 0

    def tell(self, groups: int, before: runs_pb2.Run, after: runs_pb2.Run) -> None:
        """`before` and `after` an export: groups that were accepted meanwhile need not be in the folder."""
        accepted = before.groups.accepted.groups
        if accepted - groups > self._missing:
            self._missing = accepted - groups
            sys.stderr.write(
                f"at least {self._missing} of {accepted} accepted groups are missing, and what became of them: they "
                "came while record_groups was false, or their events were gone before the recorder came (the store "
                "keeps the newest million)\n"
            )
        accepted = after.groups.accepted.groups
        if groups - accepted > self._extra:
            self._extra = groups - accepted
            sys.stderr.write(
                f"at least {self._extra} groups are there twice, or lost by the store: it has gone back since they "
                f"were recorded, and the run has accepted {accepted}\n"
            )


def _say(recording: "Recording", folder: Path, *, last: bool) -> None:
    terminal = sys.stderr.isatty()
    if terminal or last:
        end = "\r" if terminal and not last else "\n"
        sys.stderr.write(f"{recording.groups} groups, {recording.events} events in {folder}{end}")
        sys.stderr.flush()
