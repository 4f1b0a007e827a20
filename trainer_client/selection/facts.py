"""Facts of a group, as a function that selects groups sees them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


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
    trajectories: Sequence[int] = ()
    """Index of each sample's trajectory in the group, from 0; empty: each sample is one."""
    trainable: Sequence[bool] = ()
    """False for each sample that must not be trained on; empty: none is such."""
    policies: Sequence[str] = ()
    """Name of the policy or role that wrote each sample; empty: all have the same."""

    @property
    def mean_reward(self) -> float:
        """Mean reward: the pass rate where rewards are 0 or 1.

        Rows of a trajectory count as one, those of each policy apart; what is not trainable does not count.
        """
        return _mean(self.trajectory_rewards)

    @property
    def trajectory_rewards(self) -> list[float]:
        """Mean reward of each trajectory's rows that are trained on, those of each policy apart."""
        return [_mean(rewards) for of_policy in self._compared for rewards in of_policy]

    @property
    def reward_std(self) -> float:
        """Standard deviation of the rewards: the scale of group-relative advantages. Rows count as for the mean, each
        beside those of its own policy.
        """
        squares = []
        for of_policy in self._compared:
            mean = _mean([_mean(rewards) for rewards in of_policy])
            squares += [_mean([(reward - mean) ** 2 for reward in rewards]) for rewards in of_policy]
        return float(_mean(squares) ** 0.5)

    @property
    def _compared(self) -> list[list[list[float]]]:
        """Rewards that are trained on, by policy and trajectory."""
        found: dict[str, dict[int, list[float]]] = {}
        for i, reward in enumerate(self.rewards):
            if not self.trainable or self.trainable[i]:
                of_policy = found.setdefault(self.policies[i] if self.policies else "", {})
                of_policy.setdefault(self.trajectories[i] if self.trajectories else i, []).append(reward)
        return [list(of_policy.values()) for of_policy in found.values()]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
