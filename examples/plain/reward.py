"""The worker's reward: something that a tiny model can learn in a few steps without knowing anything."""

import numpy as np

from rollout_workers.rewards import RewardInput


def even_share(sample: RewardInput) -> float:
    """The share of even token ids in the response, 0 to 1; a random model makes about a half."""
    return float(np.mean(np.asarray(sample.response_ids) % 2 == 0))
