"""A history in the making: a feeder, workers, ranks of a trainer that crashes, an observer and a nemesis on one run."""

import asyncio
import random
import zlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.checker.promises import broken
from tests.faults.calls import OPTIONS
from tests.faults.cluster import Cluster, Nemesis
from tests.faults.history import History
from tests.faults.observer import last_looks, observe
from tests.faults.trainer import BATCH_GROUPS, PREFETCH, Plan, Trainer
from tests.faults.workers import Worker
from tests.support.store_server import StoreServer
from trainer_client import AsyncBufferClient, Policy

WORKERS = 5


@dataclass(frozen=True)
class Size:
    """Length at which a history is long enough."""

    steps: int = 18
    strikes: int = 5
    crashes: int = 2


@dataclass
class HistoryRun:
    """One run, from its creation to its last look."""

    cluster: Cluster
    name: str
    policy: Policy
    seed: int
    size: Size = field(default_factory=Size)
    store: StoreServer | None = None
    disaster: Callable[[History], Coroutine[Any, Any, None]] | None = None
    """Event that happens once, among the strikes."""
    may_lose: bool = False

    def __post_init__(self) -> None:
        self.history = History()
        self._rng = random.Random(zlib.crc32(f"{self.name}/{self.seed}".encode()))
        self.run_id = f"{self.name}-{self.seed}-{random.randbytes(4).hex()}"
        self.plan = Plan(self.size.steps, self.size.crashes, self._is_struck)
        self.nemesis = Nemesis(
            self.cluster,
            self.history,
            self._own(),
            self._is_enough,
            self.store,
            gently=self.disaster is not None,
        )
        self.workers = [self._worker(number) for number in range(WORKERS)]
        self.trainer = Trainer(self.run_id, self.history, self._own(), self._target, self.plan, may_lose=self.may_lose)

    def ways(self) -> set[str]:
        """Ways that payloads of answered pushes took: direct, relayed."""
        return {way for worker in self.workers for way in worker.counters.pushed_bytes}

    def _own(self) -> random.Random:
        return random.Random(self._rng.getrandbits(64))

    def _target(self) -> str:
        return self.cluster.target(self._rng)

    def _is_struck(self) -> bool:
        over = self.disaster is None or len(self.history.of("over")) > 0
        return over and self.nemesis.strikes >= self.size.strikes

    def _is_enough(self) -> bool:
        return self.plan.last_step is not None

    async def live(self) -> None:
        """Everything, to the end."""
        async with AsyncBufferClient(self._target(), OPTIONS) as client:
            await client.create_run(self.run_id, self.policy)
        async with asyncio.TaskGroup() as tasks:
            nemesis = tasks.create_task(self.nemesis.run())
            if self.disaster is not None:
                tasks.create_task(self.disaster(self.history))
            others = [tasks.create_task(worker.run()) for worker in self.workers]
            others.append(tasks.create_task(observe(self.trainer, self._target)))
            await self.trainer.run()
            for task in (nemesis, *others):
                task.cancel()
        await asyncio.to_thread(self.cluster.heal)
        await last_looks(self.history, self.run_id, [service.address for service in self.cluster.services])

    def _worker(self, number: int) -> Worker:
        return Worker(f"w{number}", self.run_id, self.history, self._own(), self._target, self._is_enough)


async def live_and_check(run: HistoryRun, folder: Path) -> None:
    """Fails with the promises that were broken; names the file that holds the history, whatever goes wrong."""
    path = folder / f"{run.run_id}.jsonl"
    try:
        await run.live()
    except BaseException as error:
        error.add_note(f"the history is {path}")
        raise
    finally:
        run.history.save(path)
    problems = broken(run.history)
    assert not problems, "\n".join([f"the history in {path} breaks", *problems])
    assert run.ways() == {"direct", "relayed"}


def policy_over_failover(wait_replicas: int, wait_timeout_ms: int = 100) -> Policy:
    """Policy of histories whose store fails over: pushes wait for room, and answers for so many replicas."""
    return Policy(
        batch_groups=BATCH_GROUPS,
        prefetch_batches=PREFETCH,
        max_queued_groups=8,
        overflow_action="block",
        max_staleness=2,
        stale_action="recycle",
        lease_ttl_ms=1_000,
        retry_backoff_ms=20,
        max_attempts=1_000,
        max_pending_tasks=30,
        record_groups=True,
        wait_replicas=wait_replicas,
        wait_timeout_ms=wait_timeout_ms,
    )
