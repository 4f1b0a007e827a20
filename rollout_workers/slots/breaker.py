"""Circuit breaker of one engine: after so many failed calls in a row it opens, and the engine gets no new work.

closed → (N failures in a row) → open → (a pause later, one trial call) → closed on success, open for longer otherwise.

Invariants: any success closes it, also of a call that was under way; it is a pure state machine, whose caller makes the
trial. What counts as a failure is decided by `counts`: the engine's, not the request's.
"""

import time
from collections.abc import Callable

from buffer_wire.connection.retry import Backoff
from rollout_workers.engine.errors import EngineError, EngineMalformed, EngineRejected, EngineTimeout, EngineUnavailable

FAILURES = 5
"""Failures in a row that open it."""

_PAUSES = Backoff(first_s=2.0, ceiling_s=60.0)


def counts(error: EngineError) -> bool:
    """True when the failed call speaks against the engine: being refused for what was asked, or for want of room, does
    not.
    """
    if isinstance(error, EngineRejected):
        return error.status >= 500 and not error.retryable
    return isinstance(error, EngineUnavailable | EngineTimeout | EngineMalformed)


class Breaker:
    """Circuit breaker of one engine. `failures`: as many in a row open it. `now_s`: a monotonic clock."""

    def __init__(
        self, failures: int = FAILURES, *, pauses: Backoff | None = None, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._threshold = failures
        self._pauses = _PAUSES if pauses is None else pauses
        self._now_s = now_s
        self._delays = self._pauses.delays()
        self._trial_at = float("inf")
        self.failures = 0
        """Failed calls in a row."""
        self.is_open = False

    def succeeded(self) -> bool:
        """Note a call that succeeded; True when that closed it."""
        closed, self.is_open = self.is_open, False
        self.failures, self._trial_at = 0, float("inf")
        if closed:
            self._delays = self._pauses.delays()
        return closed

    def failed(self) -> bool:
        """Note a call that failed; True when that opened it."""
        self.failures += 1
        opened = not self.is_open and self.failures >= self._threshold
        if opened:
            self.is_open = True
            self._trial_at = self._now_s() + next(self._delays)
        return opened

    @property
    def trial_in_s(self) -> float:
        """Seconds until the next trial is due, 0 if it is; infinite while it is closed."""
        return max(self._trial_at - self._now_s(), 0.0)

    def tried(self) -> None:
        """Note that a trial begins: the next one comes after a longer pause, unless this one succeeds."""
        if self.is_open:
            self._trial_at = self._now_s() + next(self._delays)
