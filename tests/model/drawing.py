"""Drawing from Hypothesis without ceremony: a history makes hundreds of small choices.

Hypothesis takes its time over every draw, so one draw is many bytes, and each choice is what a division of their number
leaves. All zeros is the first of every choice.
"""

from collections.abc import Sequence
from typing import TypeVar

from hypothesis import strategies as st

T = TypeVar("T")

_BYTES = 24
_CHUNKS = st.binary(min_size=_BYTES, max_size=_BYTES)
_LEAST_LEFT = 1 << 20
"""Fewer numbers than that to choose from, and the next choice would no longer be even."""


class Draw:
    """One source of choices."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data
        self._number, self._left = 0, 1

    def integer(self, low: int, high: int) -> int:
        """Draw an integer of low to high, both included."""
        if low >= high:
            return low
        if self._left < _LEAST_LEFT:
            self._number, self._left = int.from_bytes(self._data.draw(_CHUNKS)), 1 << 8 * _BYTES
        span = high - low + 1
        self._number, chosen = divmod(self._number, span)
        self._left //= span
        return low + chosen

    def pick(self, options: Sequence[T]) -> T:
        """Pick one of them."""
        return options[self.integer(0, len(options) - 1)]

    def rarely(self, one_in: int = 8) -> bool:
        """True once in so many times."""
        return self.integer(0, one_in - 1) == one_in - 1

    def recent(self, things: Sequence[T]) -> T:
        """Pick one of the last few, the newest most likely."""
        back = min(self.integer(0, 5), self.integer(0, 5))
        return things[max(0, len(things) - 1 - back)]
