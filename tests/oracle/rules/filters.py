"""Filters: which finished groups end at once because nothing could be learned from them.

Decided from the statistics in a group's header alone, before it is looked at whether there is room.
"""

from buffer_service.domain.ops import GroupFacts
from buffer_service.domain.policy import RunPolicy
from buffer_service.rules.filters import NO_REWARD_BOUND

EQUAL_REWARDS = "filtered_equal_rewards"
RESPONSE_TOKENS = "filtered_response_tokens"
MEAN_REWARD = "filtered_mean_reward"

ALL_PASSED_PPM = 1_000_000
_WINDOW = 64


def why_filtered(policy: RunPolicy, facts: GroupFacts, judge: str = "") -> str | None:
    """The statistic that counts the first filter which a group does not pass, None when it passes all.

    `judge`: the filters of "rewards" alone, or those of "lengths".
    """
    by_rewards, by_lengths = judge != "lengths", judge != "rewards"
    if by_rewards and policy.filter_equal_rewards and facts.equal_rewards:
        return EQUAL_REWARDS
    if by_lengths and facts.min_response_tokens < policy.filter_min_response_tokens:
        return RESPONSE_TOKENS
    if by_lengths and 0 < policy.filter_max_response_tokens < facts.max_response_tokens:
        return RESPONSE_TOKENS
    if not by_rewards:
        return None
    if not policy.filter_min_mean_reward_milli <= facts.mean_reward_milli <= policy.filter_max_mean_reward_milli:
        return MEAN_REWARD
    return None


def has_filter(policy: RunPolicy) -> bool:
    """Tell whether any filter is set."""
    return (
        policy.filter_equal_rewards
        or policy.filter_min_response_tokens > 0
        or policy.filter_max_response_tokens > 0
        or policy.filter_min_mean_reward_milli > -NO_REWARD_BOUND
        or policy.filter_max_mean_reward_milli < NO_REWARD_BOUND
    )


def acceptance_ppm(before: int, *, passed: bool) -> int:
    """Moving average of the share of groups that pass, in millionths, after one more group; weight 1/64."""
    return (before * (_WINDOW - 1) + (ALL_PASSED_PPM if passed else 0)) // _WINDOW
