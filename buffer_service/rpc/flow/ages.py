"""Ages of streams that have no end of their own: at its age a stream ends in good order, and its client opens another.

A connection that is `connection_age_s` old, give or take a tenth, takes no new calls: gRPC tells its client to make
another one. It leaves the calls alone that are under way. A stream lives longer than that, counted from its own
beginning. So when it ends, the connection that it came on is past its age for certain, and the next one comes on a new
connection: perhaps at another replica.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from buffer_service.observability.metrics import RpcMetrics

LONGER = (1.1, 1.3)
"""Bounds of the factor by which a stream may get older than a connection: from gRPC's own jitter on. The span spreads
streams that began together."""


class StreamAges:
    """Ages of the streams of one process; those of `connection_age_s` 0 never end."""

    def __init__(self, connection_age_s: float, metrics: RpcMetrics) -> None:
        self._connection_age_s = connection_age_s
        self._metrics = metrics

    def ends_at(self) -> float | None:
        """Loop time at which a stream that begins now is to end; None: never."""
        if not self._connection_age_s:
            return None
        jitter = random.uniform(*LONGER)  # noqa: S311 - jitter, not a secret
        return asyncio.get_running_loop().time() + self._connection_age_s * jitter

    def passed(self, method: str, ends_at: float | None) -> bool:
        """True when a stream of `method` has to end now, which is counted."""
        if ends_at is None or asyncio.get_running_loop().time() < ends_at:
            return False
        self._metrics.aged(method)
        return True

    @asynccontextmanager
    async def limit(self, method: str) -> AsyncIterator[None]:
        """Block that is broken off at the age of a stream of `method` that begins now; what follows it goes on."""
        age = asyncio.timeout_at(self.ends_at())
        try:
            async with age:
                yield
        except TimeoutError:
            if not age.expired():
                raise
            self._metrics.aged(method)
