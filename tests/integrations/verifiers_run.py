"""A run in memory, in place of the service: groups come when the test says so. And a tokenizer of characters."""

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Self

import numpy as np

from buffer_wire.codec import Delivered, join_group
from buffer_wire.errors import BatchNotReady
from buffer_wire.status import ServiceUnreachable
from tests.support.push import GroupArrays, SampleArrays
from trainer_client.batch import Batch, BatchInfo, Group
from trainer_client.policy import Policy
from trainer_client.requests import Submission
from trainer_client.state import Resumed, Submitted, TaskFailure
from trainer_client.tasks import Task


def group_of(task: Task, version: int = 0) -> GroupArrays:
    """G samples of three tokens, rewarded 0, 1, 0, …"""
    prompt = np.array(task.prompt_token_ids, np.int32)
    samples = []
    for i in range(task.group_size):
        ids = np.concatenate([prompt, np.array([65 + i, 66, 67], np.int32)])
        mask = (np.arange(len(ids)) >= len(prompt)).astype(np.uint8)
        # The second token of the response is the environment's.
        mask[len(prompt) + 1] = 0
        samples.append(
            SampleArrays(
                token_ids=ids,
                logprobs=-0.5 * mask.astype(np.float32),
                loss_mask=mask,
                prompt_len=len(prompt),
                reward=float(i % 2),
                spans=[(1, version, len(prompt), len(ids))],
            )
        )
    return GroupArrays(task_id=task.task_id, samples=samples, metadata=dict(task.metadata))


class InMemoryRun:
    """A run without a service: the tasks that were submitted, and groups in the order in which the test makes them."""

    def __init__(self) -> None:
        self.policy: Policy | None = None
        self.tasks: list[Task] = []
        self.queued: list[Group] = []
        self.committed: list[int] = []
        self.failures: list[TaskFailure] = []
        self.pulls: list[int] = []
        self.broken: Exception | None = None
        self.away = 0
        """So many pulls find no service."""
        self.given_up: list[str] = []
        """Methods whose next call finds no service for longer than a client tries."""
        self.slow_s = 0.0
        """How long a pull takes that brings something."""
        self._wanted: list[Callable[[Task], bool]] = []
        self._step = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def client(self, *_: Any) -> Self:
        """In place of AsyncBufferClient."""
        return self

    def generate(self, chosen: Callable[[Task], bool]) -> None:
        """Every task that is chosen, now or later, gets its group."""
        self._wanted.append(chosen)

    def fail(self, task: Task, error: str) -> None:
        """The task has failed for good."""
        self.tasks.remove(task)
        self.failures.append(TaskFailure(task.task_id, 5, error, 0))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def create_run(self, run_id: str, policy: Policy) -> SimpleNamespace:
        self.policy = policy
        return SimpleNamespace(policy=policy)

    async def resume(self, run_id: str, *, mode: str) -> Resumed:
        return Resumed(1, 0, 0, 0, 0, b"")

    def _reached(self, method: str) -> None:
        if method in self.given_up:
            self.given_up.remove(method)
            raise ServiceUnreachable("nobody answers", status="UNAVAILABLE")

    async def submit_tasks(self, run_id: str, submission: Submission) -> Submitted:
        assert submission.request_id, "a repeat would not be recognised"
        self._reached("submit_tasks")
        self.tasks += submission.tasks
        return Submitted(submission.cursor, tuple(t.task_id for t in submission.tasks), len(self.tasks))

    async def commit(self, run_id: str, *, epoch: int, through_step: int) -> int:
        self._reached("commit")
        self.committed.append(through_step)
        return through_step + 1

    async def run(self, run_id: str) -> SimpleNamespace:
        self._reached("run")
        if self.broken is not None:
            raise self.broken
        tasks = SimpleNamespace(pending=len(self.tasks), leased=0)
        groups = SimpleNamespace(queued=SimpleNamespace(groups=len(self.queued)), forming=SimpleNamespace(groups=0))
        return SimpleNamespace(failures=self.failures, ledger=SimpleNamespace(tasks=tasks, groups=groups))

    async def pull(self, run_id: str, *, epoch: int, step: int, batch_groups: int, timeout_s: float) -> Batch:
        if self.broken is not None:
            raise self.broken
        assert step == self._step
        if self.away:
            self.away -= 1
            raise ServiceUnreachable("nobody answers", status="UNAVAILABLE")
        deadline = time.monotonic() + min(timeout_s, 0.1)
        while True:
            self._make()
            if len(self.queued) >= batch_groups:
                break
            if time.monotonic() > deadline:
                raise BatchNotReady(
                    step=step,
                    queued_groups=len(self.queued),
                    needed_groups=batch_groups,
                    leased=0,
                    pending=len(self.tasks),
                    waits_on="the test",
                )
            await asyncio.sleep(0.002)
        if self.slow_s:
            await asyncio.sleep(self.slow_s)
        groups, self.queued = self.queued[:batch_groups], self.queued[batch_groups:]
        self._step += 1
        self.pulls.append(batch_groups)
        info = BatchInfo(step, 0, len(groups), 0, 0, 0, len(groups), 0, 0.0, 0, False, len(self.queued), 0.0)
        return Batch(info, groups, 0)

    def _make(self) -> None:
        for task in [task for task in self.tasks if any(chosen(task) for chosen in self._wanted)]:
            self.tasks.remove(task)
            body = b"".join(join_group(*group_of(task).to_wire()))
            self.queued.append(Group.of(Delivered(body, 1, 0, 0), 0))


class Characters:
    """A tokenizer of characters."""

    def encode(self, text: str) -> list[int]:
        return [ord(char) for char in text]

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        return self.encode("".join(f"{m['role']}:{m['content']};" for m in messages))
