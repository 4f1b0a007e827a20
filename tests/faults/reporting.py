"""A trainer whose tasks hear what became of them, and a worker, each a process of its own, to be killed.

python -m tests.faults.reporting trainer|worker ADDRESS
"""

import json
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from rollout_buffer.v1 import common_pb2, tasks_pb2
from tests.support.push import GroupArrays, PushingWorker, group_of_lease
from trainer_client import BufferClient, ClientOptions, GroupFacts, Policy, SamplingParams, SessionOptions, Task

RUN = "reports"
TASKS, BATCH, SAMPLES = 240, 4, 2
POLICY = Policy(
    batch_groups=BATCH,
    max_queued_groups=2 * BATCH,
    overflow_action="drop_oldest",
    filter_equal_rewards=True,
    lease_ttl_ms=1_000,
    max_attempts=2,
    retry_backoff_ms=10,
    # A worker that is killed often fails tasks; the run goes on all the same.
    failure_budget=TASKS,
)


class Hearing:
    """Tasks whose state is all that they have heard, and how many were drawn."""

    def __init__(self) -> None:
        self.drawn = 0
        self.heard: list[list[object]] = []

    def __iter__(self) -> Iterator[Task]:
        while self.drawn < TASKS:
            self.drawn += 1
            name = f"t{self.drawn}"
            sampling = SamplingParams(max_new_tokens=8)
            yield Task(
                task_id=name,
                group_size=SAMPLES,
                sampling=sampling,
                prompt_token_ids=[1, 2],
                metadata={"name": name},
            )

    def report(self, task_id: str, metadata: Mapping[str, object], rewards: Sequence[float], disposition: str) -> None:
        """Hear of a group."""
        self.heard.append([task_id, metadata.get("name"), list(rewards), disposition])

    def state(self) -> bytes:
        """Return everything."""
        return json.dumps([self.drawn, self.heard]).encode()

    def load_state(self, state: bytes) -> None:
        """Take everything back."""
        self.drawn, self.heard = json.loads(state)


def rewards_of(task_id: str) -> tuple[float, float]:
    """Rewards of a task's samples: equal in every third group."""
    digest = zlib.crc32(task_id.encode())
    return float(digest % 2), float(digest // 2 % 3 == 0)


def is_kept(task_id: str) -> bool:
    """True for six of seven tasks."""
    return zlib.crc32(task_id.encode()) % 7 > 0


def keeps(groups: Sequence[GroupFacts]) -> list[bool]:
    """Filter the groups of a step."""
    return [is_kept(group.task_id) for group in groups]


def trainer(address: str) -> None:
    """Train until all tasks are used up and all groups have ended."""
    options = SessionOptions(
        pull_timeout_s=60, max_pending_tasks=16, chunk_tasks=8, filter="tests.faults.reporting:keeps"
    )
    tasks = Hearing()
    with (
        BufferClient(address, ClientOptions(timeout_s=60)) as client,
        client.session(RUN, policy=POLICY, tasks=tasks, options=options) as session,
    ):
        for _ in session:
            session.publish()
            time.sleep(0.02)  # As long as the training takes, so that some groups are dropped.


def worker(address: str) -> None:
    """Work until it is killed."""

    def make(lease: tasks_pb2.Lease, loaded: common_pb2.WeightVersion) -> GroupArrays:
        made = group_of_lease(lease, loaded)
        rewards = rewards_of(lease.task.task_id)
        samples = [replace(sample, reward=reward) for sample, reward in zip(made.samples, rewards, strict=True)]
        return replace(made, samples=samples)

    with PushingWorker(address, RUN, make=make, patience_s=60):
        time.sleep(600)


if __name__ == "__main__":
    {"trainer": trainer, "worker": worker}[sys.argv[1]](sys.argv[2])
