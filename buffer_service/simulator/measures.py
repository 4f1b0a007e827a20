"""Counts of a simulation while it runs. Nothing counts before the warm-up is over."""

from collections import Counter
from dataclasses import dataclass

from buffer_service.simulator.buffer import Losses
from buffer_service.simulator.groups import SimulatedGroup


@dataclass(frozen=True, slots=True)
class Moment:
    """Running totals at one moment; times in token times."""

    wall: float
    trainer_idle: float
    slot_time: float
    slots_idle: float
    """Summed over the slots."""
    slots_busy: float
    """Slot time in which any slot decodes."""
    held: float
    """Wall time for which groups were leased, summed over them."""
    losses: Losses
    cut_tokens: float
    """Tokens of surplus responses that were cut off."""


class Measures:
    """Sums over the groups that count."""

    def __init__(self) -> None:
        self.begun: Moment | None = None
        """Moment at which the warm-up was over."""
        self.sampled_groups = self.sampled_longest = self.sampled_max = 0
        self.sampled_tokens: float = 0
        """Tokens that G of the responses of each group have, cut off or not."""
        self.made_tokens = 0
        self.trained_groups = self.trained_tokens = self.trained_max = 0
        self.pqs = self.iqs = 0
        self.token_staleness = 0.0
        """Tokens times their staleness."""
        self.staleness: Counter[int] = Counter()

    def sampled(self, group: SimulatedGroup) -> None:
        """A group was generated."""
        if self.begun is None:
            return
        self.sampled_groups += 1
        self.sampled_tokens += group.drawn
        self.made_tokens += group.tokens
        self.sampled_longest += group.longest
        self.sampled_max = max(self.sampled_max, group.longest)

    def trained(self, group: SimulatedGroup, train_version: int) -> None:
        """A group is to be trained by that version, in a step that counts."""
        self.trained_groups += 1
        self.trained_tokens += group.tokens
        self.trained_max = max(self.trained_max, group.longest)
        self.pqs += group.tail - group.head
        self.iqs += train_version - group.tail
        self.token_staleness += group.tokens * (train_version - group.version_time / group.total_duration)
        self.staleness[train_version - group.head] += 1

    def quantile(self, share: float) -> int:
        """The staleness that this share of the trained groups does not exceed."""
        left = share * self.trained_groups
        for versions in sorted(self.staleness):
            left -= self.staleness[versions]
            if left <= 0:
                return versions
        return max(self.staleness, default=0)
