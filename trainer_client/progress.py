"""Progress line on the terminal while the trainer waits: activity, progress, duration, and on whom it waits.

    pulling step 12 [###########-------] 20/32 groups, 0:41, about 0:24 left, on generation: 14 tasks being generated

`SessionOptions(progress=True)` shows it while a session pulls or publishes. For a single call:

    with ProgressBar() as bar:
        client.wait_for_engines("math", 3, on_wait=bar)

Invariants: it writes only to a terminal (elsewhere the log says the same every 30 s). It is one line, never longer than
the terminal is wide. The line is gone when the wait is over, also after Ctrl-C.
"""

import shutil
import sys
from typing import Self, TextIO

from buffer_wire.errors import BatchNotReady
from trainer_client.waiting import OnWait, Waiting

_CELLS = 18
_CLEAR = "\r\x1b[2K"
_LEAST_COLUMNS = 20


class ProgressBar:
    """Callable for `on_wait` that draws a progress line.

    `then`: called with every wait as well. `stream`: standard error by default.
    """

    def __init__(self, then: OnWait | None = None, *, stream: TextIO | None = None) -> None:
        self._then = then
        self._stream = sys.stderr if stream is None else stream
        self._shown = False
        self._doing = ""
        self._began = (0.0, 0)
        """Seconds waited and groups queued when this wait was first reported."""

    def __call__(self, waiting: Waiting) -> None:
        """Draw the wait as it stands now."""
        if self._stream.isatty():
            columns = max(_LEAST_COLUMNS, shutil.get_terminal_size().columns)
            self._shown = True  # First: Ctrl-C may come as soon as it is.
            self._stream.write(_CLEAR + self.line(waiting)[: columns - 1])
            self._stream.flush()
        if self._then is not None:
            self._then(waiting)

    def clear(self) -> None:
        """Remove the line, if there is one."""
        if self._shown:
            self._shown = False
            self._stream.write(_CLEAR)
            self._stream.flush()

    def line(self, waiting: Waiting) -> str:
        """Format the whole line, without regard to the terminal's width."""
        have, need = _groups(waiting)
        if waiting.doing != self._doing or waiting.waited_s < self._began[0]:
            self._doing, self._began = waiting.doing, (waiting.waited_s, have)
        parts = [_clock(waiting.waited_s), f"on {waiting.on}"]
        if not need:
            return f"{waiting.doing}, {', '.join(parts)}"
        left_s = self._left_s(waiting.waited_s, have, need)
        if left_s is not None:
            parts.insert(1, f"about {_clock(left_s)} left")
        full = min(_CELLS, _CELLS * have // need)
        bar = "#" * full + "-" * (_CELLS - full)
        return f"{waiting.doing} [{bar}] {have}/{need} groups, {', '.join(parts)}"

    def _left_s(self, waited_s: float, have: int, need: int) -> float | None:
        """Estimate the seconds left from the groups that came since the wait was first reported; None until one
        came.
        """
        since_s, came = waited_s - self._began[0], have - self._began[1]
        return max(0, need - have) * since_s / came if came > 0 and since_s > 0 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()


def _groups(waiting: Waiting) -> tuple[int, int]:
    """Groups queued and needed; (0, 0) for a wait that is not for a batch."""
    if not isinstance(waiting.error, BatchNotReady):
        return 0, 0
    data = waiting.error.attributes
    return int(data.get("queued_groups", 0)), int(data.get("needed_groups", 0))


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
