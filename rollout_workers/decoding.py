"""How much one engine has decoded for this worker, and for how long: what the service estimates utilization from.

Invariant: what is shown never falls, so that only a new process of the worker counts from 0 again.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Decoded:
    """Since the worker began with the engine."""

    tokens: int = 0
    busy_ms: int = 0
    """With at least one request in progress."""
    request_ms: int = 0
    """Summed over requests in progress."""


class DecodeMeter:
    """Of one engine. `in_hand`: tokens that have arrived of requests in progress."""

    def __init__(self, in_hand: Callable[[], int], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._in_hand = in_hand
        self._clock = clock
        self._requests = 0
        self._since = clock()
        """When the number of requests in progress changed last."""
        self._busy_s = 0.0
        self._request_s = 0.0
        self._received = 0
        self._shown = Decoded()

    @property
    def requests(self) -> int:
        """In progress now."""
        return self._requests

    def began(self, requests: int) -> None:
        """So many more requests are in progress."""
        self._pass()
        self._requests += requests

    def ended(self, requests: int) -> None:
        """So many are no longer."""
        self._pass()
        self._requests -= requests

    def received(self, tokens: int) -> None:
        """Tokens of requests that have ended."""
        self._received += tokens

    def show(self) -> Decoded:
        """As of now."""
        self._pass()
        # A request that has just ended may be in hand no longer and not yet received.
        tokens = max(self._shown.tokens, self._received + self._in_hand())
        self._shown = Decoded(tokens, int(1_000 * self._busy_s), int(1_000 * self._request_s))
        return self._shown

    def _pass(self) -> None:
        now = self._clock()
        if self._requests:
            self._busy_s += now - self._since
            self._request_s += self._requests * (now - self._since)
        self._since = now
