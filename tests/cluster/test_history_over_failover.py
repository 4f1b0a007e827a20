"""A history of feeder, workers, trainer and observer whose groups go to a cluster. Slots move, and shards fail over.

Both services are struck too. Index and shards have replicas that are waited for, so nothing that was acknowledged is
gone, and every promise holds.
"""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.cluster import Cluster, running_cluster
from tests.faults.history import History
from tests.faults.history_run import HistoryRun, Size, live_and_check
from tests.faults.promises import was_told
from tests.faults.reading import Reading
from tests.faults.trainer import BATCH_GROUPS, PREFETCH
from tests.support.sentinels import pair
from tests.support.store_cluster import StoreCluster, store_cluster
from trainer_client import Policy

pytestmark = pytest.mark.timeout(240)

SEEDS = [int(seed) for seed in os.environ.get("RB_HISTORY_SEEDS", "1").split()]
BETWEEN = 250
"""Events before each change of the cluster."""
POLICY = Policy(
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
    wait_replicas=1,
    wait_timeout_ms=500,
)


@pytest.fixture
def shards() -> Iterator[StoreCluster]:
    with store_cluster(replicas=2) as running:
        yield running


@pytest.fixture
def cluster(shards: StoreCluster, tmp_path: Path) -> Iterator[Cluster]:
    with pair() as index, running_cluster(tmp_path, index.primary.url, payload_store=shards.url) as running:
        yield running


@pytest.mark.parametrize("seed", SEEDS)
async def test_every_promise_holds_while_slots_move_and_shards_fail_over(
    cluster: Cluster, shards: StoreCluster, tmp_path: Path, seed: int
) -> None:
    async def changes(history: History) -> None:
        await history.passed(BETWEEN)
        first, last, _ = next(at for at in shards.slots() if shards.shard_of_slot(at[0]) == 0)
        await asyncio.to_thread(shards.migrate, first, (first + last) // 2, 2)
        for shard in (0, 1):
            await history.passed(BETWEEN)
            history.note("nemesis", "failover", loses=False)
            killed = shards.kill(shard)
            await asyncio.to_thread(shards.until_promoted, shard)
            killed.launch()
            await asyncio.to_thread(shards.until_whole)
        history.note("nemesis", "over")

    run = HistoryRun(cluster, "sharded", POLICY, seed, Size(crashes=1), disaster=changes)
    await live_and_check(run, tmp_path)
    assert not was_told(Reading(run.history))
    assert [op.given["loses"] for op in run.history.of("failover")] == [False, False]
