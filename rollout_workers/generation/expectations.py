"""Expectations of how long a sample still takes: the tokens that are left, and the time of each on an engine.

Both are learned from samples that have ended. Nothing is said before there were enough of them.
"""

from collections import deque

_WINDOW = 512
_ENOUGH = 32
"""Samples that have to have ended before anything is expected."""
_FEW = 8
"""Longer samples below which a mean of their rests says too little."""
_WEIGHT = 0.1
"""Weight of a new observation in a moving mean."""


class Lengths:
    """Lengths of the responses that ended last, in tokens."""

    def __init__(self) -> None:
        self._seen: deque[int] = deque(maxlen=_WINDOW)

    def saw(self, tokens: int) -> None:
        """Note the length of a finished response."""
        self._seen.append(tokens)

    def rest(self, tokens: float) -> float | None:
        """Mean of what responses had left that were as long as this at least; None before enough have ended.

        Where hardly any was as long, half of what is there: the mean excess of a heavy tail grows with the length.
        """
        if len(self._seen) < _ENOUGH:
            return None
        rests = [length - tokens for length in self._seen if length > tokens]
        return sum(rests) / len(rests) if len(rests) >= _FEW else tokens / 2


class Paces:
    """Seconds that a token of one sample takes on an engine, by the requests that are there; waits in it included.

    A bucket for each doubling of the requests.
    """

    def __init__(self) -> None:
        self._seen: dict[int, float] = {}

    def saw(self, requests: float, s_per_token: float) -> None:
        """Note a sample that ended, with the mean number of requests beside which it ran, itself included."""
        bucket = _bucket(requests)
        known = self._seen.get(bucket, s_per_token)
        self._seen[bucket] = known + _WEIGHT * (s_per_token - known)

    def at(self, requests: float) -> float | None:
        """Seconds a token among so many requests: of the nearest number that was seen; None before any was."""
        if not self._seen:
            return None
        bucket = _bucket(requests)
        return self._seen[min(self._seen, key=lambda seen: (abs(seen - bucket), seen))]


def _bucket(requests: float) -> int:
    return max(round(requests), 1).bit_length()
