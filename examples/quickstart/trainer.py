"""A trainer that trains nothing: it feeds prompts, takes batches, and says what it would train on."""

import itertools
import os
import time

from trainer_client import BufferClient, Policy, SamplingParams, Task

sampling = SamplingParams(max_new_tokens=64)
tasks = (
    Task(task_id=f"q{i}", prompt_token_ids=[1, 2, i % 50], group_size=4, sampling=sampling) for i in itertools.count()
)
# At most one batch is generated ahead of the one that is trained on.
policy = Policy(batch_groups=8, overflow_action="block", max_lookahead=1)

with (
    BufferClient(os.environ.get("RB_ADDRESS", "127.0.0.1:50051")) as client,
    client.session("first", policy=policy, tasks=tasks) as session,
):
    for batch in session:
        groups = " ".join(group.task_id for group in batch.groups)
        reward = sum(group.rewards.mean() for group in batch.groups) / len(batch.groups)
        again = " (again)" if batch.info.replayed else ""
        print(
            f"step {batch.step}{again}: {groups}, reward {reward:.2f}, staleness {batch.info.staleness_max}", flush=True
        )
        time.sleep(1)  # your training step
        session.publish()  # the next version of the weights; commits the step
