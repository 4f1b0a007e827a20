"""Reward function of the recipe's simulated workers."""

from rollout_workers.reward_inputs import RewardInput


def score(sample: RewardInput) -> float:
    """1 for an odd sample of the group, 0 for an even one."""
    return float(sample.sample_index % 2)
