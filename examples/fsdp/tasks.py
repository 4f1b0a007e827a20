"""The example's tasks and their reward: to write token ids of the lower half of the vocabulary."""

import itertools
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer_client import SamplingParams, Task

if TYPE_CHECKING:
    from rollout_workers.reward_inputs import RewardInput

VOCAB_SIZE = 64
MAX_PROMPT_TOKENS = 16
MAX_NEW_TOKENS = 256
GROUP_SIZE = 4


def tasks(seed: int) -> Iterator[Task]:
    """Random prompts without end, the same for the same seed: a resumed session goes on where it was."""
    draw = random.Random(seed)
    for _ in itertools.count():
        prompt = [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(4, MAX_PROMPT_TOKENS))]
        yield Task(
            prompt_token_ids=prompt, group_size=GROUP_SIZE, sampling=SamplingParams(max_new_tokens=MAX_NEW_TOKENS)
        )


def reward(sample: "RewardInput") -> float:
    """Share of the response's tokens in the lower half."""
    ids = sample.response_ids
    return sum(int(token) < VOCAB_SIZE // 2 for token in ids) / max(1, len(ids))
