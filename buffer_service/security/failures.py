"""Failed authentications of each peer: how many are told why and written to the log.

A secret of 256 bits needs no lock-out, and a lock-out would shut out good tokens that come from the same address. What
is bounded is what a peer that keeps failing costs: lines in the log, and messages that are made for it.
"""

import time
from collections import OrderedDict
from collections.abc import Callable

BURST = 10
PER_S = 1.0
MAX_PEERS = 1_024


class FailureLimit:
    """A token bucket for each peer: BURST at once, then PER_S a second. Holds the MAX_PEERS that failed last."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def allows(self, peer: str) -> bool:
        """Count a failure of `peer`; False when it has had too many."""
        now = self._clock()
        left, since = self._buckets.pop(peer, (float(BURST), now))
        left = min(float(BURST), left + (now - since) * PER_S)
        allowed = left >= 1.0
        self._buckets[peer] = (left - 1.0 if allowed else left, now)
        while len(self._buckets) > MAX_PEERS:
            self._buckets.popitem(last=False)
        return allowed
