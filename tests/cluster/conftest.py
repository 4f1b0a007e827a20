"""An index and a cluster for payloads, emptied for every test."""

from collections.abc import Iterator

import pytest

from tests.support.store_cluster import StoreCluster, store_cluster
from tests.support.store_server import StoreServer, store_server


@pytest.fixture(scope="session")
def index() -> Iterator[StoreServer]:
    with store_server() as running:
        yield running


@pytest.fixture(scope="session")
def shards() -> Iterator[StoreCluster]:
    """A cluster whose nodes live through the tests that use it."""
    with store_cluster() as running:
        yield running
