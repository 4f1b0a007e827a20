"""The reward of the quickstart."""

from rollout_workers.rewards import RewardInput


def even_share(sample: RewardInput) -> float:
    """The share of even token ids in the response, 0 to 1."""
    even = [token for token in sample.response_ids if token % 2 == 0]
    return len(even) / max(1, len(sample.response_ids))
