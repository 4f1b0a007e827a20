"""The store's scripts and the reference model agree on everything that can be seen, over random histories."""

import os

import pytest

from tests.model import outcomes
from tests.model.budget import TIMES, explore
from tests.model.subjects import StoreSubject

ON_VALKEY = int(20_000 * TIMES)
ON_CLUSTER = int(10_000 * TIMES)
ON_REDIS_7 = int(5_000 * TIMES)
ENOUGH_FOR_EVERY_OUTCOME = 20_000


def agree(store: StoreSubject, operations: int) -> None:
    seen = explore(store, operations)
    assert [name for name in outcomes.OPERATIONS if not seen[f"op:{name}"]] == []
    for more in range(10):
        if operations >= ENOUGH_FOR_EVERY_OUTCOME and outcomes.missing(seen):
            # Histories of another RB_MODEL_SEED, or of other rules, can miss what is rare by chance. So can those of a
            # process that has loaded other modules, whose constants Hypothesis draws.
            seen += explore(store, operations // 2, seed=f"again {more}")
    print("\n".join(f"{name} {seen[name]}" for name in sorted(seen)))
    assert seen["operations"] >= operations
    assert operations < ENOUGH_FOR_EVERY_OUTCOME or outcomes.missing(seen) == []


@pytest.mark.timeout(3_600)
def test_the_store_does_on_valkey_what_the_model_does(valkey: StoreSubject) -> None:
    agree(valkey, ON_VALKEY)


@pytest.mark.skipif(os.environ.get("RB_TEST_PAYLOADS") != "cluster", reason="make test-cluster")
@pytest.mark.timeout(3_600)
def test_the_store_does_with_payloads_on_a_cluster_what_the_model_does(on_cluster: StoreSubject) -> None:
    agree(on_cluster, ON_CLUSTER)


@pytest.mark.skipif(os.environ.get("RB_TEST_STORE") != "cluster", reason="make test-cluster")
@pytest.mark.timeout(3_600)
def test_the_store_does_with_runs_over_a_cluster_what_the_model_does(all_on_cluster: StoreSubject) -> None:
    agree(all_on_cluster, ON_CLUSTER)


@pytest.mark.redis7
@pytest.mark.timeout(1_800)
def test_the_store_does_on_redis_7_what_the_model_does(redis_7: StoreSubject) -> None:
    agree(redis_7, ON_REDIS_7)
