"""Which steps are trained, when a step holds groups of several requests.

Invariants: a step is through when none of its requests is still to be trained; what is committed is the longest row of
such steps, so that a group whose request was not trained is never committed. Threads may share it.
"""

import threading
from collections.abc import Iterable


class Progress:
    """Steps from `begin` on, each with the requests whose groups it holds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first = 0
        """The first step that is not through."""
        self._committed = 0
        """Steps below it are committed."""
        self._waiting: dict[int, set[object]] = {}
        """Requests to be trained, by step."""

    def begin(self, step: int) -> None:
        """Steps below `step` are committed."""
        with self._lock:
            self._first = self._committed = step

    def pulled(self, step: int, owners: Iterable[object]) -> None:
        """`step` holds groups of `owners`."""
        with self._lock:
            self._waiting[step] = set(owners)
            self._advance()

    def trained(self, owners: Iterable[object]) -> None:
        """Nothing of `owners` is to be trained any more."""
        with self._lock:
            gone = set(owners)
            for waiting in self._waiting.values():
                waiting.difference_update(gone)
            self._advance()

    def uncommitted(self) -> int | None:
        """The last step that can be committed and is not yet; None if there is none."""
        with self._lock:
            return self._first - 1 if self._first > self._committed else None

    def committed(self, through_step: int) -> None:
        """Steps up to `through_step` are committed."""
        with self._lock:
            self._committed = max(self._committed, through_step + 1)

    def _advance(self) -> None:
        while self._first in self._waiting and not self._waiting[self._first]:
            del self._waiting[self._first]
            self._first += 1
