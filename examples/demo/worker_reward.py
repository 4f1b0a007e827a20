"""The reward function that the demo's worker loads: `examples.demo.worker_reward:reward`."""

from examples.demo.reward import exact_match
from rollout_workers.rewards import RewardInput


def reward(sample: RewardInput) -> float:
    """1.0 where the response is exactly the task's answer, else 0.0."""
    return exact_match(sample.response_ids.tolist(), str(sample.metadata["answer"]))
