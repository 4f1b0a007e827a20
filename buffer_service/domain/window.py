"""The window over which a run is measured: its running totals as they were at publishes.

A run's totals only grow. Every publish of a new version keeps a snapshot of those in TOTALS, `WINDOW_VERSIONS`
intervals at most; what happened in between is a difference. A resume and a change of the policy forget the snapshots:
before and after are not one regime.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from struct import unpack

from buffer_service.rules.totals import LENGTH_BUCKETS, STALENESS_BOUNDS, STALENESS_COUNTED

_BUCKETS = tuple(min(bits, LENGTH_BUCKETS - 1) for bits in range(33))
"""Bucket of a response length of a uint32, by the bits of the length less one."""


def length_buckets(response_lengths: bytes) -> dict[int, int]:
    """Number of samples in each bucket of response lengths; `response_lengths` as in ops.GroupFacts."""
    lengths = unpack(f"<{len(response_lengths) // 4}I", response_lengths)
    buckets = [_BUCKETS[(length - 1).bit_length()] if length else 0 for length in lengths]
    # There are few of them: counting each is one call.
    return {bucket: buckets.count(bucket) for bucket in set(buckets)}


def no_staleness() -> dict[str, list[int]]:
    """Counts of staleness by bucket, all 0."""
    return {name: [0] * (len(STALENESS_BOUNDS) + 1) for name in STALENESS_COUNTED}


def staleness_bucket(versions: int) -> int:
    """Index of the bucket in which a staleness counts."""
    return bisect_left(STALENESS_BOUNDS, versions)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The totals at a publish. `time_ms`: milliseconds since 1970, by the store's clock."""

    time_ms: int
    version: int
    totals: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Window:
    """Window from one publish to a later one. `publishes`: how many came after the first, at least 1."""

    first: Snapshot
    last: Snapshot
    publishes: int

    @property
    def seconds(self) -> float:
        """Seconds between both publishes."""
        return (self.last.time_ms - self.first.time_ms) / 1000

    def grown(self, name: str) -> int:
        """Growth of a total of TOTALS in the window."""
        return self.last.totals[name] - self.first.totals[name]
