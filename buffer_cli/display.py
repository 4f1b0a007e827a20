"""Displays that are shown again and again until Ctrl-C or SIGTERM: the signals, the terminal's screen, the clocks."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import FrameType
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.live import Live

INTERVAL_S = 2.0
"""Seconds between two looks, where nothing else is said."""


class Signals:
    """SIGTERM and Ctrl-C while a display lasts: either ends what is inside of `end_it`, once, and nothing else.

    One that comes at another time, as while the screen is entered or left, is kept for the next `end_it`.
    """

    def __init__(self) -> None:
        self._came = self._may_raise = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for one in (signal.SIGINT, signal.SIGTERM):
            self._before[one] = signal.signal(one, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)

    @contextmanager
    def end_it(self) -> Iterator[None]:
        """Raises KeyboardInterrupt where a signal has come, or comes."""
        try:
            self._may_raise = True
            if self._came:
                raise KeyboardInterrupt
            yield
        finally:
            self._may_raise = False

    def _hear(self, _number: int, _frame: FrameType | None) -> None:
        first, self._came = not self._came, True
        if first and self._may_raise:
            raise KeyboardInterrupt


@contextmanager
def screen(console: Console) -> Iterator[Callable[[RenderableType], None]]:
    """The alternate screen of a terminal, which is left whatever ends the display; yields what redraws it in place."""
    live = Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop")
    try:
        live.start()
        yield lambda what: live.update(what, refresh=True)
    finally:
        live.stop()  # Live, as a context, does not leave what it failed to enter.


def now() -> str:
    """The time for programs, in UTC: 2026-11-22T06:55:01Z."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def clock() -> str:
    """The time for people, on this machine's clock: 06:55:01."""
    return datetime.now().astimezone().strftime("%H:%M:%S")
