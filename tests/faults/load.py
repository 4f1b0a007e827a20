"""Workers and a trainer on a store, each noting what was promised to it, through whatever happens to the store.

What is retryable is tried again until the deadline; StoreRolledBack and RunPaused end a participant, as they end a
trainer; anything else fails the test.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from buffer_service.domain import ops
from buffer_service.domain.ports import Topic
from buffer_wire.errors import RolloutBufferError, RunPaused
from tests.store.driver import Run, claim, weights

T = TypeVar("T")

BATCH_GROUPS = 4
DEADLINE_S = 60.0
RETRY_S = 0.05


def body_of(task_id: str) -> bytes:
    """Return what a task's group holds: a few bytes to a few hundred KB, the same for the same task."""
    seeded = random.Random(task_id)
    return task_id.encode() + seeded.randbytes(seeded.choice([0, 100, 3_000, 60_000, 200_000]))


@dataclass
class Load:
    """A run under load. `replicas` are those of the service, with which the participants take turns."""

    replicas: list[Run]
    acknowledged: list[str] = field(default_factory=list)
    """Tasks whose group was said to be queued, or to have been before."""
    batches: dict[int, list[str]] = field(default_factory=dict)
    """Tasks of the groups of each step, as the trainer got them."""
    interruptions: list[str] = field(default_factory=list)
    """Reasons of what was tried again."""
    ended_by: list[RunPaused] = field(default_factory=list)
    """Errors that told participants that the store has lost something."""
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    enough: bool = False
    """Workers make no new groups."""
    all_delivered: bool = False
    """The trainer waits for no further batch."""

    def delivered(self) -> list[str]:
        """Tasks of all steps."""
        return [task for tasks in self.batches.values() for task in tasks]

    async def work(self, worker: int) -> None:
        """Push ever new groups until there are enough."""
        seen = 0
        while not self.enough:
            try:
                seen = max(seen, await self.push(f"t{next(self.numbers)}", worker, seen))
            except RunPaused as error:
                self.ended_by.append(error)
                return

    async def push(self, task_id: str, worker: int = 0, seen: int = 0) -> int:
        """Push the task's group until it is acknowledged; the revision."""

        async def attempt(run: Run) -> ops.PushResult:
            group = run.group(task_id, body_of(task_id), head=weights(0, run.term))
            return await run.store.push(run.run_id, [group], seen_revision=claim(seen))

        result = await self.until_answered(worker, attempt)
        assert [pushed.kind.value for pushed in result.outcomes] in (["queued"], ["duplicate"]), result
        self.acknowledged.append(task_id)
        return result.revision

    async def train(self, step: int = 0) -> None:
        """Pull, check, publish, step after step."""
        seen = 0
        try:
            while not self.all_delivered:
                pulled = await self._pull(step, seen)
                if isinstance(pulled, ops.Batch):
                    await self._check(step, pulled)
                    seen = max(seen, await self._publish(step, max(seen, pulled.revision)))
                    step += 1
        except RunPaused as error:
            self.ended_by.append(error)

    async def _publish(self, step: int, seen: int) -> int:
        published = await self.until_answered(step, lambda run: run.publish(step + 1, step, seen=seen))
        return published.revision

    async def _pull(self, step: int, seen: int) -> ops.Batch | ops.Short:
        notifications, run_id = self.replicas[step % len(self.replicas)].store.notifications, self.replicas[0].run_id
        ticket = notifications.ticket(run_id, Topic.GROUPS)
        pulled = await self.until_answered(step, lambda run: run.pull(step, seen=seen))
        if isinstance(pulled, ops.Short):
            await notifications.wait(run_id, Topic.GROUPS, ticket, 0.2)
        return pulled

    async def _check(self, step: int, batch: ops.Batch) -> None:
        tasks = [group.group_id.removesuffix("/0") for group in batch.shard]
        bodies = await self.until_answered(step, lambda run: run.bodies(batch))
        assert bodies == [body_of(task) for task in tasks]
        self.batches[step] = tasks

    async def until_answered(self, turn: int, call: Callable[[Run], Awaitable[T]]) -> T:
        """Try again what is retryable, at the next replica of the service, as a client does."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                return await call(self.replicas[turn % len(self.replicas)])
            except RolloutBufferError as error:
                if not error.retryable or time.monotonic() > deadline:
                    raise
                self.interruptions.append(error.reason)
                turn += 1
                await asyncio.sleep(RETRY_S)

    async def until(self, met: Callable[[], bool], what: str, *busy: asyncio.Task[None]) -> None:
        """Wait for something of the load; its deadline names it. Ends when one of the `busy` fails."""
        deadline = time.monotonic() + DEADLINE_S
        while not met():
            for task in busy:
                if task.done():
                    await task
            assert time.monotonic() < deadline, (
                f"{what}: not in time; {len(self.acknowledged)} acknowledged, {len(self.delivered())} delivered"
            )
            await asyncio.sleep(0.01)
