"""A whole worker over simulated engines that works for a fake of the service."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollout_buffer.v1 import tasks_pb2
from rollout_workers.counters import Counters
from rollout_workers.engine.options import SimulatedOptions
from rollout_workers.engine.simulated.engine import SimulatedEngine
from rollout_workers.engine.simulated.hosts import SimulatedHost, own_hosts
from rollout_workers.functions import Rollout
from rollout_workers.rewards import RewardFunction
from rollout_workers.worker import Worker
from tests.workers.building import length_reward, options
from tests.workers.fake_service import FakeService

SLOW = SimulatedOptions(tokens_per_s=50.0, length_median=1_000.0, length_sigma=0.0)


class Running:
    def __init__(self, worker: Worker, hosts: list[SimulatedHost], running: "asyncio.Task[None]") -> None:
        self.worker = worker
        self.hosts = hosts
        self.running = running

    @property
    def engine(self) -> SimulatedEngine:
        return self.hosts[0].engine

    async def end(self) -> None:
        self.worker.stop()
        await asyncio.wait_for(self.running, 20)


@asynccontextmanager
async def working(
    fake: FakeService,
    tmp_path: Path,
    *,
    reward: RewardFunction = length_reward,
    rollout: Rollout | None = None,
    judge: str | None = None,
    from_options: bool = False,
    limit_s: float = 60.0,
    **more: Any,
) -> AsyncIterator[Running]:
    """`judge` names the reward function, as the command line does, empty for none; `reward` is one. `from_options`: the
    functions are those that the options name.
    """
    if judge is not None:
        more["reward"] = judge
    if judge == "":
        more["rollout"] = "m:f"  # As `rollout` is injected, it is never imported.
    made = options(fake.address, tmp_path, **more)
    hosts = own_hosts(made)
    worker = Worker(made, reward=None if from_options or judge is not None else reward, rollout=rollout, hosts=hosts)
    running = asyncio.create_task(worker.run())
    try:
        async with asyncio.timeout(limit_s):
            yield Running(worker, hosts, running)
            if not running.done():
                worker.stop()
            await running
            assert_every_token_has_an_end(worker.counters)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def assert_every_token_has_an_end(counters: Counters) -> None:
    ended = counters.tokens_pushed + counters.tokens_returned + sum(counters.tokens_discarded.values())
    assert counters.tokens + counters.tokens_resumed == ended, counters


def all_done(fake: FakeService) -> Callable[[], bool]:
    return lambda: len(fake.results()) == len(fake.tasks)


def given_back(fake: FakeService, kind: "tasks_pb2.ReturnKind.ValueType") -> list[tasks_pb2.LeaseReturn]:
    return [returned for returned in fake.returns if returned.kind == kind]


async def failed_return(fake: FakeService) -> tasks_pb2.LeaseReturn:
    await fake.until(lambda: bool(given_back(fake, tasks_pb2.RETURN_KIND_FAILED)))
    return given_back(fake, tasks_pb2.RETURN_KIND_FAILED)[0]
