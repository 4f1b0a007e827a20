"""One private server for the session, emptied for every test; RB_TEST_PAYLOADS=cluster: and a cluster for payloads."""

import os
from collections.abc import AsyncIterator, Iterator

import pytest

from buffer_service.store.redis_store import RedisRunStore
from tests.store.driver import Run
from tests.support.store_cluster import StoreCluster, store_cluster
from tests.support.store_server import StoreServer, store_server


@pytest.fixture(scope="session")
def server() -> Iterator[StoreServer]:
    with store_server() as running:
        yield running


@pytest.fixture(scope="session")
def cluster() -> Iterator[StoreCluster | None]:
    """The cluster that payloads lie on, None where they lie beside the index."""
    if os.environ.get("RB_TEST_PAYLOADS") != "cluster":
        yield None
        return
    with store_cluster() as running:
        yield running


@pytest.fixture
async def store(server: StoreServer, cluster: StoreCluster | None) -> AsyncIterator[RedisRunStore]:
    server.flush()
    if cluster is not None:
        cluster.flush()
    connected = await RedisRunStore.connect(
        server.url, timeout_s=10, payload_store=cluster.url if cluster is not None else ""
    )
    yield connected
    await connected.close()


@pytest.fixture
def run(store: RedisRunStore) -> Run:
    """A run that does not exist yet: begin with `await run.create(...)`."""
    return Run(store)
