"""Histories of feeder, workers, trainer and observer on a run of a cluster. Its slot moves, and its shard fails over.

Both services are struck too. Every promise holds.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from buffer_service.store.keys import index_key
from buffer_wire.resp.slots import slot_of
from tests.cluster.test_history_over_failover import BETWEEN, POLICY
from tests.faults.cluster import Cluster, running_cluster
from tests.faults.history import History
from tests.faults.history_run import HistoryRun, Size, live_and_check
from tests.faults.promises import was_told
from tests.faults.reading import Reading
from tests.support.store_cluster import StoreCluster, store_cluster

pytestmark = pytest.mark.timeout(240)

RUN = "sharded"


@pytest.fixture
def shards() -> Iterator[StoreCluster]:
    with store_cluster(replicas=2) as running:
        yield running


@pytest.fixture
def cluster(shards: StoreCluster, tmp_path: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path, shards.url) as running:
        yield running


async def test_every_promise_holds_while_the_run_moves_and_its_shard_fails_over(
    cluster: Cluster, shards: StoreCluster, tmp_path: Path
) -> None:
    slot = slot_of(index_key(RUN, "run"))

    async def changes(history: History) -> None:
        for to in (0, 1, 2):
            await history.passed(BETWEEN)
            if shards.shard_of_slot(slot) != to:
                await asyncio.to_thread(shards.migrate, slot, slot, to)
        for shard in (2, 0):
            await history.passed(BETWEEN)
            history.note("nemesis", "failover", loses=False)
            killed = shards.kill(shard)
            await asyncio.to_thread(shards.until_promoted, shard)
            killed.launch()
            await asyncio.to_thread(shards.until_whole)
        history.note("nemesis", "over")

    run = HistoryRun(cluster, RUN, POLICY, 1, Size(crashes=1), disaster=changes)
    await live_and_check(run, tmp_path)
    assert not was_told(Reading(run.history))
    assert [op.given["loses"] for op in run.history.of("failover")] == [False, False]
