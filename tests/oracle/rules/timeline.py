"""Versions across resumes: what a version of an abandoned timeline counts as in the present one.

When a trainer resumes, its new epoch starts from an older version, the fork. What the abandoned epochs published after
the fork no longer exists, so tokens made with it count as made with the fork's version.
Invariant: one fork per epoch after the first, in order of epochs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from buffer_service.domain.gate import MILLI
from buffer_service.domain.ops import WeightVersion


@dataclass(slots=True)
class Timeline:
    """The forks of a run: (epoch e, version f) says that epoch e started from version f."""

    forks: list[tuple[int, int]] = field(default_factory=list)

    def fork(self, epoch: int, version: int) -> None:
        """Epoch `epoch` starts from `version`."""
        self.forks.append((epoch, version))

    def effective(self, weights: WeightVersion) -> int:
        """The version that `weights` count as: min(version, f of every fork of a later epoch)."""
        return min([weights.version, *self._later(weights.epoch)])

    def effective_milli(self, mean_milli: int, epoch: int) -> int:
        """Compute the same for a mean, in milli-versions, over tokens of which the newest are of that epoch."""
        return min([mean_milli, *(MILLI * version for version in self._later(epoch))])

    def _later(self, epoch: int) -> Iterator[int]:
        return (version for forked, version in self.forks if forked > epoch)
