"""Versions across resumes: what a version of an abandoned timeline counts as in the present one.

When a trainer resumes, its new term starts from an older version, the fork. What the abandoned terms published after
the fork no longer exists, so tokens made with it count as made with the fork's version.
Invariant: one fork per term after the first, in order of terms.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from buffer_service.domain.gate import MILLI
from buffer_service.domain.ops import WeightVersion


@dataclass(slots=True)
class Timeline:
    """The forks of a run: (term e, version f) says that term e started from version f."""

    forks: list[tuple[int, int]] = field(default_factory=list)

    def fork(self, term: int, version: int) -> None:
        """Term `term` starts from `version`."""
        self.forks.append((term, version))

    def effective(self, weights: WeightVersion) -> int:
        """The version that `weights` count as: min(version, f of every fork of a later term)."""
        return min([weights.version, *self._later(weights.term)])

    def effective_milli(self, mean_milli: int, term: int) -> int:
        """Compute the same for a mean, in milli-versions, over tokens of which the newest are of that term."""
        return min([mean_milli, *(MILLI * version for version in self._later(term))])

    def _later(self, term: int) -> Iterator[int]:
        return (version for forked, version in self.forks if forked > term)
