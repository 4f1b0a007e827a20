"""The reward function that the example's worker loads: `examples.trl.reward:digits`."""

import numpy as np

from examples.demo import vocabulary
from rollout_workers.rewards import RewardInput

_DIGITS = vocabulary.encode("0123456789")


def digits(sample: RewardInput) -> float:
    """The share of digits in the response: easy to learn, and rarely the same for all samples of a group."""
    return float(np.isin(sample.response_ids, _DIGITS).mean())
