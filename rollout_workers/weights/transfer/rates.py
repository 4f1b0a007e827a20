"""Measured rates of servers of weights, by their address: which mirror is asked first, and over how many connections.

A rate is that of one connection. Rules: a mirror that failed is asked last for a minute; one without a measurement of
the last five minutes is measured by one piece; then the fastest is asked. The one in use is left only for one that is
half as fast again: of two that are about as fast, one fetches.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

MAX_STREAMS = 16
"""Most connections to one server for one file."""

_PER_STREAM_S = 0.005
_MEASURED_S = 300.0
_FAILED_S = 60.0
_SETTLED = 1.5
_LEAST_BYTES = 256 << 10
"""Answers below this say how far a server is, and nothing of its rate."""
_WEIGHT = 0.3


@dataclass(slots=True)
class _Rate:
    bytes_per_s: float = 0.0
    measured_at: float = -math.inf
    failed_at: float = -math.inf
    latency_s: float = math.inf
    asked: int = 0
    """Requests under way."""


class Rates:
    """Rates of the servers of one process."""

    def __init__(self) -> None:
        self._rates: dict[str, _Rate] = {}
        self._in_use = ""

    def began(self, url: str) -> None:
        """Note a request. To be followed by `ended`."""
        self._of(url).asked += 1

    def answered(self, url: str, latency_s: float) -> None:
        """Note the time until the head of an answer came."""
        rate = self._of(url)
        rate.latency_s = min(rate.latency_s, latency_s)

    def ended(self, url: str, *, received: int, seconds: float, failed: bool) -> None:
        """Note the end of a request: bytes and seconds of its body."""
        rate, now = self._of(url), time.monotonic()
        rate.asked -= 1
        if failed:
            rate.failed_at = now
        elif received >= _LEAST_BYTES:
            measured = received / max(seconds, 1e-6)
            fresh = now - rate.measured_at < _MEASURED_S
            rate.bytes_per_s = rate.bytes_per_s + _WEIGHT * (measured - rate.bytes_per_s) if fresh else measured
            rate.measured_at = now

    def order(self, mirrors: Sequence[str]) -> tuple[list[str], list[str]]:
        """Base URLs of mirrors in the order in which they are asked, and those that failed of late."""
        now = time.monotonic()
        failed = [url for url in mirrors if now - self._of(url).failed_at < _FAILED_S]
        good = [url for url in mirrors if url not in failed]
        unmeasured = [url for url in good if now - self._of(url).measured_at > _MEASURED_S]
        measured = sorted((url for url in good if url not in unmeasured), key=self._bytes_per_s, reverse=True)
        if measured:
            used = self._in_use if self._in_use in measured else measured[0]
            if self._bytes_per_s(measured[0]) < _SETTLED * self._bytes_per_s(used):
                measured.remove(used)
                measured.insert(0, used)
            self._in_use = measured[0]
        idle = [url for url in unmeasured if not self._of(url).asked]
        busy = [url for url in unmeasured if url not in idle]
        return [*idle, *measured, *busy], failed

    def streams(self, url: str) -> int:
        """Connections that a server is worth: one for each 5 ms until it answers."""
        latency = self._of(url).latency_s
        return 1 if math.isinf(latency) else max(1, min(MAX_STREAMS, int(latency / _PER_STREAM_S)))

    def describe(self, mirrors: Sequence[str]) -> str:
        """Say what is known of each mirror, as a line of the log that explains the choice."""
        good, failed = self.order(mirrors)
        return ", ".join(f"{url} {self._known(url)}" for url in [*good, *failed])

    def _known(self, url: str) -> str:
        rate = self._of(url)
        if time.monotonic() - rate.failed_at < _FAILED_S:
            return "failed"
        if math.isinf(rate.measured_at):
            return "not measured"
        return f"{rate.bytes_per_s / 1e6:.1f} MB/s a connection, {rate.latency_s * 1000:.0f} ms"

    def _bytes_per_s(self, url: str) -> float:
        return self._of(url).bytes_per_s

    def _of(self, url: str) -> _Rate:
        return self._rates.setdefault(origin(url), _Rate())


def origin(url: str) -> str:
    """Address of the server of a URL, with its scheme."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"
