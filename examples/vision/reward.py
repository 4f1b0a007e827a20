"""Reward of the worker: 1 for the name of the image's colour."""

from rollout_workers.rewards import RewardInput


def reward(sample: RewardInput) -> float:
    """1 if the answer is right, else 0."""
    return float(sample.response_ids[0] == sample.metadata["answer"])
