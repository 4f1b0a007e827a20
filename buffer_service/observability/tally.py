"""Tally of increments to a process's metrics, added up before they are written.

A write to memory that is shared with the admin page costs as much as handling a small group.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client import Counter, Histogram

FLUSH_S = 0.5


class SummedHistogram(Histogram):
    """A histogram that takes many observations at once."""

    def add(self, counts: Sequence[int], total: float) -> None:
        """Add observations: how many each bucket has (not those below it), and their sum."""
        self._sum.inc(total)
        for bucket, count in zip(self._buckets, counts, strict=True):
            if count:
                bucket.inc(count)

    @property
    def bounds(self) -> Sequence[float]:
        """Upper bounds of the buckets, the last one infinite."""
        return self._upper_bounds


class Observations:
    """Observations that a histogram is still to get."""

    def __init__(self, histogram: SummedHistogram) -> None:
        self._histogram = histogram
        self._bounds = histogram.bounds
        self._counts = [0] * len(self._bounds)
        self._total = 0.0

    def observe(self, amount: float) -> None:
        """Add one observation."""
        self._counts[bisect_left(self._bounds, amount)] += 1
        self._total += amount

    def flush(self) -> None:
        """Hand the observations over to the histogram."""
        counts, total = self._counts, self._total
        self._counts, self._total = [0] * len(counts), 0.0
        self._histogram.add(counts, total)


class Tally:
    """Tally of increments to counters and histograms. They are written FLUSH_S later, or at `flush`."""

    def __init__(self) -> None:
        self._counts: dict[Counter, int] = {}
        self._observed: set[Observations] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, counter: Counter, amount: int) -> None:
        """Add to a counter."""
        self._counts[counter] = self._counts.get(counter, 0) + amount
        if self._timer is None:
            self._start_timer()

    def observe(self, observations: Observations, amount: float) -> None:
        """Note an observation for a histogram."""
        observations.observe(amount)
        self._observed.add(observations)
        if self._timer is None:
            self._start_timer()

    def _start_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        """Write all of it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        counts, self._counts = self._counts, {}
        for counter, amount in counts.items():
            counter.inc(amount)
        observed, self._observed = self._observed, set()
        for observations in observed:
            observations.flush()
