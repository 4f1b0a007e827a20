"""Facts of a group, as a function that selects groups sees them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer_client.batch import Group

_LENGTH = 2
"""FINISH_REASON_LENGTH, without the wire's messages: the function's process imports this module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """Facts of a group: what its header says, without any token."""

    group_id: str
    """Id of the group: task_id/incarnation."""
    task_id: str
    environment: str
    metadata: Mapping[str, object] = field(default_factory=dict)
    """Metadata of the task."""
    rewards: Sequence[float]
    """Reward of each sample, those of stages included."""
    response_tokens: Sequence[int]
    """Tokens of each sample's response."""
    loss_tokens: Sequence[int]
    """Tokens of each sample that are trained on."""
    truncated: Sequence[bool]
    """True for each sample that met the length limit."""
    staleness: int
    """Staleness in versions: train_version − head_version, at least 0."""
    train_version: int

    @property
    def mean_reward(self) -> float:
        """Mean of the rewards: the pass rate where they are 0 or 1."""
        return sum(self.rewards) / len(self.rewards)

    @property
    def reward_std(self) -> float:
        """Standard deviation of the rewards over the samples: the scale of group-relative advantages."""
        mean = self.mean_reward
        return float((sum((reward - mean) ** 2 for reward in self.rewards) / len(self.rewards)) ** 0.5)


def facts_of(group: "Group") -> GroupFacts:
    """Read the facts of a group."""
    samples = group.header.samples
    return GroupFacts(
        group_id=f"{group.task_id}/{group.incarnation}",
        task_id=group.task_id,
        environment=group.environment,
        metadata=dict(group.metadata),
        rewards=[sample.reward for sample in samples],
        response_tokens=[sample.tokens - sample.prompt_len for sample in samples],
        loss_tokens=[sample.loss_tokens for sample in samples],
        truncated=[sample.finish_reason == _LENGTH for sample in samples],
        staleness=group.staleness,
        train_version=group.train_version,
    )
