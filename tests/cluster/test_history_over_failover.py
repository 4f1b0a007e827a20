"""Histories of feeder, workers, trainer and observer with their groups, or the whole run, on a cluster.

Slots move, and shards fail over; both services are struck too. Servers have replicas that are waited for, so nothing
that was acknowledged is gone, and every promise holds.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from buffer_service.store.keys import index_key
from buffer_wire.resp.slots import slot_of
from tests.chaos.checker.promises import was_told
from tests.chaos.checker.reading import Reading
from tests.faults.cluster import Cluster, running_cluster
from tests.faults.history import History
from tests.faults.history_run import HistoryRun, Size, live_and_check, policy_over_failover
from tests.support.sentinels import pair
from tests.support.store_cluster import StoreCluster, store_cluster

pytestmark = pytest.mark.timeout(240)

SEEDS = [int(seed) for seed in os.environ.get("RB_HISTORY_SEEDS", "1").split()]
BETWEEN = 250
"""Events before each change of the cluster."""
RUN = "sharded"


@pytest.fixture
def shards() -> Iterator[StoreCluster]:
    with store_cluster(replicas=2) as running:
        yield running


async def fail_over(history: History, shards: StoreCluster, *which: int) -> None:
    """Kill the primaries of these shards, one after another, and have each come back as a replica."""
    for shard in which:
        await history.passed(BETWEEN)
        history.note("nemesis", "failover", loses=False)
        killed = shards.kill(shard)
        await asyncio.to_thread(shards.until_promoted, shard)
        killed.launch()
        await asyncio.to_thread(shards.until_whole)
    history.note("nemesis", "over")


async def live(
    cluster: Cluster, seed: int, changes: Callable[[History], Coroutine[Any, Any, None]], tmp_path: Path
) -> None:
    run = HistoryRun(cluster, RUN, policy_over_failover(1, 500), seed, Size(crashes=1), disaster=changes)
    await live_and_check(run, tmp_path)
    assert not was_told(Reading(run.history))
    assert [op.given["loses"] for op in run.history.of("failover")] == [False, False]


@pytest.mark.parametrize("seed", SEEDS)
async def test_every_promise_holds_while_slots_of_payloads_move_and_their_shards_fail_over(
    shards: StoreCluster, tmp_path: Path, seed: int
) -> None:
    async def changes(history: History) -> None:
        await history.passed(BETWEEN)
        first, last, _ = next(at for at in shards.slots() if shards.shard_of_slot(at[0]) == 0)
        await asyncio.to_thread(shards.migrate, first, (first + last) // 2, 2)
        await fail_over(history, shards, 0, 1)

    with pair() as index, running_cluster(tmp_path, index.primary.url, payload_store=shards.url) as cluster:
        await live(cluster, seed, changes, tmp_path)


@pytest.mark.parametrize("seed", SEEDS)
async def test_every_promise_holds_while_a_run_moves_and_its_shard_fails_over(
    shards: StoreCluster, tmp_path: Path, seed: int
) -> None:
    slot = slot_of(index_key(RUN, "run"))

    async def changes(history: History) -> None:
        for to in (0, 1, 2):
            await history.passed(BETWEEN)
            if shards.shard_of_slot(slot) != to:
                await asyncio.to_thread(shards.migrate, slot, slot, to)
        await fail_over(history, shards, 2, 0)

    with running_cluster(tmp_path, shards.url) as cluster:
        await live(cluster, seed, changes, tmp_path)
