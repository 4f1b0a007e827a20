"""Token buckets: bounds on how often somebody may do something."""

import time
from collections import OrderedDict
from collections.abc import Callable

MAX_NAMES = 1_024


class RateLimit:
    """A bucket for each name: `burst` at once, then `per_s` a second. Holds the MAX_NAMES that came last."""

    def __init__(self, per_s: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def allows(self, name: str) -> bool:
        """Count one of `name`; False when it has had too many."""
        now = self._clock()
        left, since = self._buckets.pop(name, (self._burst, now))
        left = min(self._burst, left + (now - since) * self._per_s)
        allowed = left >= 1.0
        self._buckets[name] = (left - 1.0 if allowed else left, now)
        while len(self._buckets) > MAX_NAMES:
            self._buckets.popitem(last=False)
        return allowed
