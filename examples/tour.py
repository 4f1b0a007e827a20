"""A tour in one file: service, worker and trainer in one process tree; the engine is simulated."""

import itertools

import rollout_buffer
from rollout_workers.rewards import RewardInput
from trainer_client import SamplingParams, Task


def even_share(sample: RewardInput) -> float:
    """The share of even token ids in the response, 0 to 1."""
    even = [token for token in sample.response_ids if token % 2 == 0]
    return len(even) / max(1, len(sample.response_ids))


sampling = SamplingParams(max_new_tokens=64)
tasks = (Task(prompt_token_ids=[1, 2, i % 50], group_size=4, sampling=sampling) for i in itertools.count())

with rollout_buffer.local(even_share) as buffer, buffer.session(tasks) as session:
    print(f"watch it at {buffer.page}")
    for batch in itertools.islice(session, 10):
        reward = sum(group.rewards.mean() for group in batch.groups) / len(batch.groups)
        print(f"step {batch.step}: {len(batch.groups)} groups, reward {reward:.2f}", flush=True)
        session.publish()  # train here
