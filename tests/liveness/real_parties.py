"""The parties of a run against a real service: real workers over simulated engines with troubles, a real trainer."""

import asyncio
import itertools
import random
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import get_args

from rollout_workers.engine.options import SimulatedOptions
from rollout_workers.engine.simulated.engine import SimulatedEngine
from rollout_workers.engine.simulated.hosts import own_hosts
from rollout_workers.options import WorkerOptions
from rollout_workers.rewards import RewardInput
from rollout_workers.worker import Worker
from tests.liveness.simulation import Habits
from trainer_client import BufferClient, SamplingParams, SessionOptions, Task
from trainer_client.client.requests import ResumeMode

REWARD = "tests.liveness.real_parties:reward"
TRAIN_S = 0.05
PULL_TIMEOUT_S = 60.0


class RewardRefused(RuntimeError):
    """Some answers cannot be scored."""


def reward(sample: RewardInput) -> float:
    """0 or 1, by the answer; one answer in sixteen cannot be scored."""
    number = int(sample.response_ids.sum())
    if number % 16 == 0:
        raise RewardRefused
    return float(number % 2)


def endless(environments: tuple[str, ...]) -> Iterator[Task]:
    for i in itertools.count():
        yield Task(
            task_id=f"t{i:05d}",
            group_size=2,
            sampling=SamplingParams(max_new_tokens=40),
            prompt_token_ids=[1 + i % 7, 2, 3],
            environment=environments[i % len(environments)],
            priority=i % 3,
        )


# ── workers ──────────────────────────────────────────────────────────────────


class Crew:
    """Workers of one run, in this event loop: steady, slow, troubled, and one that dies again and again."""

    def __init__(self, address: str, run_id: str, directory: Path, seed: int) -> None:
        self._address = address
        self._run_id = run_id
        self._directory = directory
        self._random = random.Random(seed)
        self._names = itertools.count()

    async def work(self) -> None:
        """Wait until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._worker("steady", tokens_per_s=1_000.0)[0].run())
            group.create_task(self._worker("slow", tokens_per_s=60.0)[0].run())
            troubled, engine = self._worker("troubled", tokens_per_s=1_000.0)
            group.create_task(troubled.run())
            group.create_task(self._trouble(engine))
            group.create_task(self._mortal())

    def _worker(self, name: str, *, tokens_per_s: float) -> tuple[Worker, SimulatedEngine]:
        options = WorkerOptions(
            address=self._address,
            run_id=self._run_id,
            reward=REWARD,
            worker_id=f"{name}-{next(self._names)}",
            weights_dir=self._directory / name,
            simulated=SimulatedOptions(
                tokens_per_s=tokens_per_s, length_median=14.0, length_sigma=0.7, seed=self._random.randrange(1_000)
            ),
            groups_per_engine=2,
            lease_wait_s=0.5,
            progress_every_s=0.0,
            drain_grace_s=1.0,
            max_sample_attempts=1,
        )
        (host,) = own_hosts(options)
        return Worker(options, hosts=[host]), host.engine

    async def _trouble(self, engine: SimulatedEngine) -> None:
        """Trouble that engines make: samples fail, the process dies, everything stalls, weights are not taken."""
        while True:
            await asyncio.sleep(0.2)
            match self._random.randrange(4):
                case 0:
                    engine.fail_samples(self._random.randrange(2), 3)
                case 1:
                    await engine.die()
                    await asyncio.sleep(0.2)
                    await engine.revive()
                case 2:
                    engine.stall()
                    await asyncio.sleep(0.3)
                    engine.unstall()
                case _:
                    engine.fail_next_loads(1)

    async def _mortal(self) -> None:
        """A worker that ends without a word; what it held comes back when its leases run out."""
        while True:
            running = asyncio.create_task(self._worker("mortal", tokens_per_s=400.0)[0].run())
            try:
                await asyncio.sleep(1.5)
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)


# ── the trainer ──────────────────────────────────────────────────────────────


def train(address: str, run_id: str, habits: Habits, environments: tuple[str, ...], steps: int, seed: int) -> int:
    """Train that many steps, in several sessions where the trainer crashes; returns the groups that it saw."""
    chance = random.Random(seed)
    groups = 0
    with BufferClient(address) as client:
        while steps > 0:
            part = steps if habits.crashes == 0 else min(steps, 2)
            groups += _session(client, run_id, habits, environments, part, chance)
            steps -= part
    return groups


def _session(
    client: BufferClient, run_id: str, habits: Habits, environments: tuple[str, ...], steps: int, chance: random.Random
) -> int:
    policy = client.run(run_id).policy
    prefetch, per_publish, n = policy.prefetch_batches or 0, policy.batches_per_publish or 1, policy.batch_groups or 1
    seen = 0
    with client.session(
        run_id,
        tasks=endless(environments),
        prefetch=prefetch,
        world_size=habits.world_size,
        batch_groups=(lambda step: 1 + step % n) if habits.own_sizes else None,
        options=SessionOptions(mode=chance.choice(get_args(ResumeMode)), pull_timeout_s=PULL_TIMEOUT_S),
    ) as session:
        for i, batch in enumerate(itertools.islice(session, steps)):
            seen += len(batch.groups)
            for rank in range(1, habits.world_size):
                other = client.pull(run_id, term=session.term, step=batch.step, rank=rank, world_size=habits.world_size)
                assert other.info.total_groups == batch.info.total_groups
                seen += len(other.groups)
            time.sleep(TRAIN_S)
            if (i + 1) % per_publish == 0 or i == steps - 1:
                session.publish()
    return seen


async def live(
    address: str,
    run_id: str,
    directory: Path,
    habits: Habits,
    environments: tuple[str, ...],
    *,
    steps: int,
    seed: int,
) -> int:
    """All parties at once, until the trainer has its steps."""
    crew = Crew(address, run_id, directory, seed)
    async with AsyncExitStack() as stack:
        work = asyncio.create_task(crew.work())
        stack.push_async_callback(_ended, work)
        training = asyncio.create_task(asyncio.to_thread(train, address, run_id, habits, environments, steps, seed))
        done, _ = await asyncio.wait({work, training}, return_when=asyncio.FIRST_COMPLETED)
        if work in done:
            await work
        return await training


async def _ended(work: "asyncio.Task[None]") -> None:
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
