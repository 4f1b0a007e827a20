"""Turns on a machine that several measure on: a lock on a file, held over several cells and passed on in between."""

import fcntl
import time
from pathlib import Path
from types import TracebackType
from typing import Self

_PAUSE_S = 2.0
"""Time between two turns, in which those that wait for the lock get it."""


class Turns:
    """Turns of at most `longest_s`, a cell that has begun aside. Without a file there is one turn, without end."""

    def __init__(self, lock: Path | None, longest_s: float) -> None:
        self._file = lock.open("a") if lock is not None else None
        self._longest_s = longest_s
        self._began = 0.0

    def __enter__(self) -> Self:
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self._began = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def next(self, expected_s: float) -> None:
        """Go on with what takes about so long; in the next turn, if this one is too short for it."""
        if self._file is None or time.monotonic() + expected_s < self._began + self._longest_s:
            return
        fcntl.flock(self._file, fcntl.LOCK_UN)
        time.sleep(_PAUSE_S)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._began = time.monotonic()
