"""Tasks and reward of the launch script: sums of two numbers, answered as chat."""

import itertools
from collections.abc import Iterator

from rollout_workers.rewards import RewardInput
from trainer_client import SamplingParams, Task

GROUP_SIZE = 8


def tasks() -> Iterator[Task]:
    """Without end, the same at each call: what was submitted before a restart is skipped."""
    for i in itertools.count():
        a, b = 100 + i * 7919 % 900, 100 + i * 104729 % 900
        yield Task(
            task_id=f"sum-{i:08d}",
            group_size=GROUP_SIZE,
            sampling=SamplingParams(max_new_tokens=1024, temperature=1.0),
            messages=[{"role": "user", "content": f"What is {a} + {b}? End with the number alone."}],
            environment="arithmetic",
            metadata={"answer": str(a + b)},
        )


def reward(rollout: RewardInput) -> float:
    """1 for the right number at the end, else 0."""
    return float((rollout.text or "").strip().rstrip(".").endswith(str(rollout.metadata["answer"])))
