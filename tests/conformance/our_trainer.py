"""A trainer as the conformance kit starts one: a session of trainer_client that trains on nothing, for ever."""

import itertools
import sys
from collections.abc import Iterator

from trainer_client.client.blocking import BufferClient
from trainer_client.policy import Policy
from trainer_client.tasks import SamplingParams, Task

POLICY = Policy(batch_groups=4, max_uses=2, reuse_share_milli=500, reuse_max_staleness=2)


def tasks() -> Iterator[Task]:
    for i in itertools.count():
        yield Task(prompt_token_ids=[1, 2, 3, i % 50], group_size=2, sampling=SamplingParams(max_new_tokens=16))


def main(address: str, run_id: str) -> None:
    with BufferClient(address) as client:
        train(client, run_id)


def train(client: BufferClient, run_id: str) -> None:
    with client.session(run_id, policy=POLICY, tasks=tasks()) as session:
        for batch in session:
            if batch.step % 4 == 1:
                # The first one is new, the last one used again.
                session.reject(batch, [batch.groups[0], batch.groups[-1]], "not these")
            if batch.step % 2:
                session.commit()
            session.publish()
            if batch.step % 3 == 2:
                session.checkpoint()


if __name__ == "__main__":
    main(*sys.argv[1:])
