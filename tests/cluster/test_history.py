"""Workers, ranks and a trainer on one run of two services whose payloads lie on a cluster. Processes are killed at
random while slots move from shard to shard: the history that they saw keeps every promise.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.faults.cluster import running_cluster
from tests.faults.history_run import HistoryRun, live_and_check
from tests.faults.test_concurrent_history import POLICIES, SEEDS, SIZE
from tests.support.store_cluster import StoreCluster, store_cluster
from tests.support.store_server import StoreServer

pytestmark = pytest.mark.timeout(240)


@contextlib.asynccontextmanager
async def moving_slots(cluster: StoreCluster) -> AsyncIterator[list[int]]:
    """Some slots go around, as long as the body runs; the shards that it came to."""
    came_to: list[int] = []
    stop = asyncio.Event()

    async def move() -> None:
        while not stop.is_set():
            for shard in (1, 2, 0):
                await asyncio.to_thread(cluster.migrate, 0, 1_500, shard)
                came_to.append(shard)

    moving = asyncio.create_task(move())
    try:
        yield came_to
    finally:
        stop.set()
        await moving


@pytest.mark.parametrize("policy", POLICIES)
async def test_every_promise_holds_over_a_cluster(tmp_path: Path, policy: str) -> None:
    with (
        StoreServer("--appendonly", "yes", "--appendfsync", "no", "--auto-aof-rewrite-percentage", "0") as index,
        store_cluster(replicas=0) as shards,
        running_cluster(tmp_path, index.url, payload_store=shards.url) as services,
    ):
        run = HistoryRun(services, policy, POLICIES[policy], SEEDS[0], SIZE, None)
        async with moving_slots(shards) as came_to:
            await live_and_check(run, tmp_path)
        assert len(came_to) > 3
