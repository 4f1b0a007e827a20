"""One private server for the session, emptied for every test; RB_TEST_PAYLOADS=cluster: and a cluster for payloads.

RB_TEST_STORE=cluster: a cluster alone, for runs and payloads.
"""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from buffer_service.store.redis_store import RedisRunStore
from tests.store.driver import Run, emptied
from tests.support.store_cluster import StoreCluster, store_cluster
from tests.support.store_server import StoreServer, store_server

BESIDE_INDEX = {
    # Counts calls, of which one more stages.
    "test_what_must_be_dropped_for_a_group_is_dropped_in_portions_within_one_push",
    # No expiry: it is staged.
    "test_who_meets_a_full_queue_keeps_the_payload_for_the_next_try",
    "test_a_blocked_payload_that_is_rejected_after_all_expires",
    "test_a_run_that_was_rolled_back_leaves_the_payload_for_a_repeat",
    # Deleted by the next sweep.
    "test_what_waited_and_was_given_up_is_missing",
    # Reach into the transaction.
    "test_a_bundle_that_fails_in_the_middle_leaves_nobody_in_the_line",
    "test_what_fails_between_two_parts_leaves_parts_that_expire",
    "test_parts_that_another_server_has_are_not_indexed",
    "test_all_index_keys_of_a_run_are_in_one_slot_and_payloads_in_any",
}
"""Tests of what is otherwise where payloads lie on a cluster."""

RUNS_ON_CLUSTER = os.environ.get("RB_TEST_STORE") == "cluster"
PAYLOADS_ON_CLUSTER = RUNS_ON_CLUSTER or os.environ.get("RB_TEST_PAYLOADS") == "cluster"
ABOUT_ONE_SERVER: set[str] = set()
"""Tests that have a server of their own, or reach into it; left out where runs lie on a cluster."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out, over a cluster, what is about payloads beside the index."""
    if os.environ.get("RB_TEST_PAYLOADS") == "cluster":
        for item in items:
            # Of users on a cluster: tests/cluster/test_access.py.
            names = {item.path.name, item.originalname}  # type: ignore[attr-defined]
            if item.path.parent == Path(__file__).parent and names & (BESIDE_INDEX | {"test_users.py"}):
                item.add_marker(pytest.mark.skip(reason="about payloads beside the index"))


@pytest.fixture(scope="session")
def server() -> Iterator[StoreServer]:
    with store_server() as running:
        yield running


@pytest.fixture(scope="session")
def cluster() -> Iterator[StoreCluster | None]:
    """The cluster that payloads lie on, None where they lie beside the index."""
    if not PAYLOADS_ON_CLUSTER:
        yield None
        return
    with store_cluster() as running:
        yield running


@pytest.fixture
async def store(server: StoreServer, cluster: StoreCluster | None) -> AsyncIterator[RedisRunStore]:
    connected = await emptied(None if RUNS_ON_CLUSTER else server, cluster)
    yield connected
    await connected.close()


@pytest.fixture
def run(store: RedisRunStore) -> Run:
    """A run that does not exist yet: begin with `await run.create(...)`."""
    return Run(store)
