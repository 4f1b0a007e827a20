"""KV cache of the simulated engine, bounded in tokens: when it is full, whoever began last leaves it and waits.

As in SGLang, a sample that has left is computed anew when it is let in again. Invariants: who is alone stays, however
long; nobody enters before those that wait longer.
"""

from math import inf

from rollout_workers.changes import Changes
from rollout_workers.engine.simulated.decoding import Decoding

_POLL_S = 0.01
"""Shortest time between two looks of a sample whether the cache is full."""


class KvCache:
    """Cache of so many tokens, `inf` without a bound. For use within one event loop."""

    def __init__(self, tokens: float) -> None:
        self._tokens = tokens
        self._held: list[Decoding] = []
        """Samples in it, in the order of their entries."""
        self._waiting: list[Decoding] = []
        self._changes = Changes()
        self.retractions = 0
        """Times that a sample had to leave."""

    @property
    def usage(self) -> float:
        """Share in use, 0 to 1."""
        return min(self._used / self._tokens, 1.0)

    @property
    def waiting(self) -> int:
        """Samples that hold a slot and wait to enter."""
        return len(self._waiting)

    @property
    def _used(self) -> int:
        return sum(sample.context for sample in self._held)

    async def enter(self, sample: Decoding, *, first: bool = False) -> None:
        """Return when the sample is in, or was aborted. `first`: before those that wait."""
        self._waiting.insert(0 if first else len(self._waiting), sample)

        def may_end() -> bool:
            fits = not self._held or self._used + sample.context <= self._tokens
            return sample.aborted or (fits and self._waiting[0] is sample)

        try:
            await self._changes.until(may_end)
            self._held.append(sample)
        finally:
            self._waiting.remove(sample)
            self._changes.notify()

    def leave(self, sample: Decoding) -> None:
        """Take a sample out; one that is not in is none of its business."""
        if sample in self._held:
            self._held.remove(sample)
            self._changes.notify()

    def retracts(self, sample: Decoding) -> bool:
        """True when the cache is over-full and the sample has to leave, being the last that entered; it has left."""
        if self._used <= self._tokens or len(self._held) == 1:
            return False
        if (last := self._held[-1]) is not sample:
            last.wake.set()
            return False
        self.leave(sample)
        self.retractions += 1
        return True

    def look_again(self) -> None:
        """Look again at samples that may have been aborted."""
        self._changes.notify()

    def look_in_s(self, rate: float) -> float:
        """Seconds until it may be full, each sample making `rate` tokens a second."""
        if self._tokens == inf:
            return inf
        return max((self._tokens - self._used) / (rate * max(len(self._held), 1)), _POLL_S)
