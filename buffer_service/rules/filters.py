"""Filters: conditions under which a finished group ends at once, because nothing could be learned from it.

They are judged at the push, by the facts of the group's header, in this order and before room is looked for.
"""

from dataclasses import dataclass
from typing import Literal

NO_REWARD_BOUND = 10**12
"""Value of a reward bound, in milli-rewards, that is beyond any reward: no bound."""


@dataclass(frozen=True, slots=True)
class Filter:
    """A condition: `fact` of a pushed group (rules.groups.PUSHED) compared with the value of the policy's `field`."""

    reason: str
    """Name for people; the statistic filtered_<reason> counts the groups that it ends."""
    fact: str
    comparison: Literal["==", "<", ">"]
    field: str
    off: int
    """Value of the field with which nothing is filtered."""

    @property
    def judges_rewards(self) -> bool:
        """True where it judges rewards, which a stage may write later."""
        return "reward" in self.fact

    @property
    def statistic(self) -> str:
        """Name of the counter of groups that it ends."""
        return f"filtered_{self.reason}"


FILTERS = (
    Filter("equal_rewards", "equal_rewards", "==", "filter_equal_rewards", 0),
    Filter("response_tokens", "min_response_tokens", "<", "filter_min_response_tokens", 0),
    Filter("response_tokens", "max_response_tokens", ">", "filter_max_response_tokens", 0),
    Filter("mean_reward", "mean_reward_milli", "<", "filter_min_mean_reward_milli", -NO_REWARD_BOUND),
    Filter("mean_reward", "mean_reward_milli", ">", "filter_max_mean_reward_milli", NO_REWARD_BOUND),
)

REASONS = tuple(dict.fromkeys(each.reason for each in FILTERS))
