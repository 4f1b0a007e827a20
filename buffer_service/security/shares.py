"""Shares of a process: bounds on what one token may take, so that whoever holds it cannot keep the others out.

Callers without a token have no name by which to tell them apart, and no share.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from buffer_service.security.rate import RateLimit
from buffer_wire.errors import NotReady

BURST_S = 2.0
"""Seconds' worth of calls that may come at once, as after a restart of the service."""


class Shares:
    """Shares of tokens in a process: `rpcs` RPCs of a token in progress, and `per_s` new ones a second; 0: no bound."""

    def __init__(self, rpcs: int, per_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rpcs = rpcs
        self._rate = RateLimit(per_s, BURST_S * per_s, clock) if per_s else None
        self._per_s = per_s
        self._open: Counter[str] = Counter()

    def admit(self, token_id: str) -> None:
        """Count a call that begins. Raises NotReady when the token has begun too many just now."""
        if token_id and self._rate is not None and not self._rate.allows(token_id):
            raise NotReady(
                f"token {token_id!r} calls more often than {self._per_s} times a second (max_token_rpcs_per_s); "
                "ask again"
            )

    @contextmanager
    def held(self, token_id: str) -> Iterator[None]:
        """Hold an RPC open. Raises NotReady when the token holds as many as it may."""
        if not token_id:
            yield
            return
        if self._rpcs and self._open[token_id] >= self._rpcs:
            raise NotReady(
                f"{self._rpcs} RPCs of token {token_id!r} are in progress, as many as it may have at one process "
                "(max_token_rpcs); ask again"
            )
        self._open[token_id] += 1
        try:
            yield
        finally:
            self._open[token_id] -= 1
            if not self._open[token_id]:
                del self._open[token_id]
