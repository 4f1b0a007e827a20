"""Failures of each sample of a group under one lease: which samples may be tried again, when, and which are given up.

A sample that fails, in generation or in its reward, is tried again alone while its siblings go on; what is given up
goes back with the lease, beside the siblings that are kept.
"""

from collections import Counter
from collections.abc import Sequence

from rollout_workers.errors import retry_after_s_of

FIRST_WAIT_S = 0.2
LONGEST_WAIT_S = 2.0


class Attempts:
    """Counts failures by the sample's index. `most`: attempts of one sample, at least 1."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._failures: Counter[int] = Counter()
        self.given_up: dict[int, Exception] = {}
        """The last error of every sample that is tried no more under this lease."""
        self._retry_after_s: dict[int, float] = {}
        self.errors = 0
        """Failures of all samples."""
        self.again = 0
        """Attempts beyond the first ones."""

    def failed(self, sample_index: int, error: Exception, *, final: bool = False) -> bool:
        """Note a failure; True when the sample may be tried again. `final`: it may not, whatever is left."""
        self._failures[sample_index] += 1
        self._retry_after_s[sample_index] = retry_after_s_of(error)
        self.errors += 1
        again = not final and self._failures[sample_index] < self._most
        if not again:
            self.given_up[sample_index] = error
        return again

    def failures(self, sample_index: int) -> int:
        """Attempts of a sample that have failed."""
        return self._failures[sample_index]

    def keep(self, indices: Sequence[int]) -> None:
        """Forget all samples but these, whose indexes are 0, 1, … from now on."""
        failures, given_up = self._failures, self.given_up
        self._failures = Counter({new: failures[old] for new, old in enumerate(indices)})
        self.given_up = {new: given_up[old] for new, old in enumerate(indices) if old in given_up}
        self._retry_after_s = {}

    def wait_s(self, sample_index: int) -> float:
        """Seconds to wait before the next attempt."""
        own_s = min(FIRST_WAIT_S * 2.0 ** max(self._failures[sample_index] - 1, 0), LONGEST_WAIT_S)
        return max(own_s, self._retry_after_s.get(sample_index, 0.0))
