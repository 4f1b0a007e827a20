"""Meter of one engine's decoding for this worker, in tokens and time, from which the service estimates utilization.

Invariant: what is shown never falls, so that only a new process of the worker counts from 0 again.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Decoded:
    """Totals of one engine since the worker began with it."""

    tokens: int = 0
    busy_ms: int = 0
    """Time with at least one request that decodes."""
    request_ms: int = 0
    """Time of decoding summed over requests, each from its first token to its last."""


class DecodeMeter:
    """Meter of one engine. `in_hand`: tokens that have arrived of calls under way."""

    def __init__(self, in_hand: Callable[[], int], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._in_hand = in_hand
        self._clock = clock
        self._requests = 0
        self._since = clock()
        """Clock time at which time was last counted."""
        self._busy_s = 0.0
        self._request_s = 0.0
        self._received = 0
        self._shown = Decoded()

    def changed(self, by: int) -> None:
        """Note that `by` more requests decode. A DecodingListener."""
        self._pass()
        self._requests += by

    def received(self, tokens: int) -> None:
        """Count the tokens of calls that have ended."""
        self._received += tokens

    def request_s(self) -> float:
        """Time of decoding so far, summed over requests, in seconds."""
        self._pass()
        return self._request_s

    def show(self) -> Decoded:
        """Totals as of now."""
        self._pass()
        # A call that has just ended may be in hand no longer and not yet received.
        tokens = max(self._shown.tokens, self._received + self._in_hand())
        self._shown = Decoded(tokens, int(1_000 * self._busy_s), int(1_000 * self._request_s))
        return self._shown

    def _pass(self) -> None:
        now = self._clock()
        if self._requests:
            self._busy_s += now - self._since
            self._request_s += self._requests * (now - self._since)
        self._since = now
