"""Workers, ranks and a trainer on one run of two services over one store. Processes are killed at random and the
store's disk is full at times: the history that they saw keeps every promise.

RB_HISTORY_SEEDS ("1 2 3") and RB_HISTORY_STEPS (18) make a longer hunt.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.cluster import Cluster, running_cluster
from tests.faults.history_run import HistoryRun, Size, live_and_check
from tests.faults.trainer import BATCH_GROUPS, PREFETCH
from tests.support.store_server import StoreServer
from trainer_client import Policy

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

SEEDS = [int(seed) for seed in os.environ.get("RB_HISTORY_SEEDS", "1 2 3").split()]
SIZE = Size(steps=int(os.environ.get("RB_HISTORY_STEPS", "18")))

COMMON: dict[str, Any] = {
    "batch_groups": BATCH_GROUPS,
    "prefetch_batches": PREFETCH,
    "lease_ttl_ms": 1_000,
    "retry_backoff_ms": 20,
    "max_attempts": 1_000,
    "max_pending_tasks": 30,
    "max_queued_tokens": 30_000,
    "record_groups": True,
}
POLICIES = {
    "queue_drop": Policy(**COMMON, max_queued_groups=9, overflow_action="drop_oldest", max_staleness=2),
    "block": Policy(
        **COMMON,
        max_queued_groups=7,
        overflow_action="block",
        max_inflight_groups=10,
        max_lookahead=2,
        max_staleness=2,
        stale_action="recycle",
        cancel_stale_leases=True,
        quota_groups=3 * BATCH_GROUPS,
        order="stalest_first",
    ),
    "streaming": Policy(
        **COMMON,
        max_queued_groups=BATCH_GROUPS,
        overflow_action="block",
        micro_batch_groups=1,
        equal_shards=True,
        max_staleness=3,
        environments={"sums": 3, "words": 1},
    ),
}


@pytest.fixture(scope="module")
def store() -> Iterator[StoreServer]:
    """Store of the durability level `process`. Its file is not rewritten: it takes the embedded store's owner to
    make that safe on a full disk (tests/store/test_append_only.py).
    """
    with StoreServer("--appendonly", "yes", "--appendfsync", "no", "--auto-aof-rewrite-percentage", "0") as running:
        yield running


@pytest.fixture(scope="module")
def cluster(store: StoreServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster"), store.url) as running:
        yield running


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("policy", POLICIES)
async def test_every_promise_holds_while_processes_are_killed(
    cluster: Cluster, store: StoreServer, tmp_path: Path, policy: str, seed: int
) -> None:
    cluster.heal()
    await live_and_check(HistoryRun(cluster, policy, POLICIES[policy], seed, SIZE, store), tmp_path)
