"""Expectations of how long a sample still takes: the tokens that are left, and the time of each on an engine.

Both are learned from samples that have ended. Nothing is said before there were enough of them.
"""

from collections import deque

import numpy as np
import numpy.typing as npt

_WINDOW = 512
_ENOUGH = 32
"""Samples that have to have ended before anything is expected."""
_FEW = 8
"""Longer samples below which a mean of their rests says too little."""


class Lengths:
    """Lengths of the responses that ended last, in tokens."""

    def __init__(self) -> None:
        self._seen: deque[int] = deque(maxlen=_WINDOW)
        self._sorted: npt.NDArray[np.int64] | None = None

    def saw(self, tokens: int) -> None:
        """Note the length of a finished response."""
        self._seen.append(tokens)
        self._sorted = None

    def rest(self, tokens: float) -> float | None:
        """Mean of what responses had left that were as long as this at least; None before enough have ended.

        Where hardly any was as long, half of what is there: the mean excess of a heavy tail grows with the length.
        """
        if len(self._seen) < _ENOUGH:
            return None
        if self._sorted is None:
            self._sorted = np.sort(np.array(self._seen))
        longer = self._sorted[np.searchsorted(self._sorted, tokens, side="right") :]
        return float(longer.mean()) - tokens if len(longer) >= _FEW else tokens / 2


class Paces:
    """Seconds that a token of one sample takes on an engine, by the requests that decode there; waits in it included.

    A step of an engine costs a part that is always the same, and one for each request. So the paces of the samples that
    ended last lie about a line, over the mean number of requests beside which they ran.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self._line: tuple[float, float, float] | None = None
        """Pace at no request, slope, and the least pace that is believed."""

    def saw(self, requests: float, s_per_token: float) -> None:
        """Note a sample that ended, with the mean number of requests that decoded meanwhile, itself included."""
        self._seen.append((requests, s_per_token))
        self._line = None

    def at(self, requests: float) -> float | None:
        """Seconds a token among so many requests; None before enough samples have ended."""
        if len(self._seen) < _ENOUGH:
            return None
        if self._line is None:
            self._line = self._fit()
        base, slope, least = self._line
        return max(base + slope * requests, least)

    def _fit(self) -> tuple[float, float, float]:
        """Least squares; no slope that is less than three times its standard error: then nothing is to be gained."""
        x, y = np.array(self._seen).T
        mean, variation = float(y.mean()), float(((x - x.mean()) ** 2).sum())
        if variation <= 0:
            return mean, 0.0, mean
        slope = float(((x - x.mean()) * y).sum()) / variation
        off = y - mean - slope * (x - x.mean())
        error = float(np.sqrt((off**2).sum() / (len(y) - 2) / variation))
        if slope <= 3 * error:
            return mean, 0.0, mean
        return mean - slope * float(x.mean()), slope, float(y.min())
