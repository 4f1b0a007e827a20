"""Limit on the bandwidth of all downloads of a process: a token bucket."""

import asyncio
import time

_BURST_S = 0.1
"""Time whose bytes may come at once after a silence."""


class Throttle:
    """Bucket that fills with `max_mbps` megabits per second; 0 is no limit."""

    def __init__(self, max_mbps: float = 0.0) -> None:
        self._bytes_per_s = max_mbps * 125_000
        self._free_at = 0.0
        """Moment at which what was let through so far has had its time, on the monotonic clock."""

    async def passed(self, size: int) -> None:
        """Wait until `size` bytes, which have come, are within the limit; whoever waits reads no more meanwhile."""
        if not self._bytes_per_s:
            return
        now = time.monotonic()
        self._free_at = max(self._free_at, now - _BURST_S) + size / self._bytes_per_s
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)
