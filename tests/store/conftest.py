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
ABOUT_ONE_SERVER = {
    # Empties it.
    "test_a_run_that_vanished_from_the_store_leaves_no_payload_behind",
    # Connects to it again.
    "test_runs_in_another_layout_are_refused",
    "test_a_store_without_runs_is_brought_to_a_newer_layout_and_to_no_older_one",
    # Counts its calls.
    "test_a_new_process_of_a_worker_that_held_much_returns_it_in_portions",
    # Ends its connections.
    "test_a_reconnect_raises_every_ticket",
}
"""Tests that reach into the server that decides; left out where runs lie on a cluster."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out, over a cluster, what is about payloads beside the index."""
    # Of users on a cluster: tests/cluster/test_access.py.
    left_out = BESIDE_INDEX | {"test_users.py"} if PAYLOADS_ON_CLUSTER else set()
    left_out |= ABOUT_ONE_SERVER if RUNS_ON_CLUSTER else set()
    for item in items:
        names = {item.path.name, item.originalname}  # type: ignore[attr-defined]
        if item.path.parent == Path(__file__).parent and names & left_out:
            item.add_marker(pytest.mark.skip(reason="about payloads beside the index, or a server alone"))


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
