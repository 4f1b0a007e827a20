"""The load `loop`: a worker on simulated engines that do not wait, and a trainer's session that does nothing else."""

import itertools
from contextlib import ExitStack

from bench.roles import Handler

RUN = "loop"
BATCH_GROUPS = 32
SAMPLES = 8
TOKENS = 256
"""Tokens of a response: a group has 19 KB with its prompts."""
ENGINES = (
    *("--simulate", "--tokens-per-s", "1000000", "--slots", "128"),
    *("--length-median", str(TOKENS), "--length-sigma", "0", "--groups-per-engine", "16"),
)
"""Flags of the worker."""


def collector() -> dict[str, Handler]:
    """Commands `address` and `requests` of a collector that drops what it gets."""
    from bench.traces.receiver import receiver

    stack = ExitStack()
    made = stack.enter_context(receiver())
    made.drops = True
    return {"address": lambda: made.address, "requests": lambda: made.requests, "close": stack.close}


def trainer(address: str) -> dict[str, Handler]:
    """Command `train`: so many steps, each pulled, read and published by its name alone."""
    from trainer_client import BufferClient, SessionOptions
    from trainer_client.policy import Policy
    from trainer_client.tasks import SamplingParams, Task

    sampling = SamplingParams(max_new_tokens=TOKENS)
    tasks = (
        Task(task_id=f"t{i}", prompt_token_ids=[1, 2, 3], group_size=SAMPLES, sampling=sampling)
        for i in itertools.count()
    )
    policy = Policy(batch_groups=BATCH_GROUPS, max_queued_groups=4 * BATCH_GROUPS, overflow_action="block")
    client = BufferClient(address)
    stack, options = ExitStack(), SessionOptions(pull_timeout_s=120.0)
    session = stack.enter_context(client.session(RUN, policy=policy, tasks=tasks, options=options))

    def train(steps: int) -> None:
        for _ in range(steps):
            batch = next(session)
            if sum(len(group.columns) > 0 for group in batch.groups) != BATCH_GROUPS:
                raise RuntimeError(f"step {batch.step} lacks groups")
            session.publish()

    return {"train": train, "close": stack.close}
