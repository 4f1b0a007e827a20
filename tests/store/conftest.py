"""One private server for the session, emptied for every test."""

from collections.abc import AsyncIterator, Iterator

import pytest

from buffer_service.store.redis_store import RedisRunStore
from tests.store.driver import Run
from tests.support.store_server import StoreServer, store_server


@pytest.fixture(scope="session")
def server() -> Iterator[StoreServer]:
    with store_server() as running:
        yield running


@pytest.fixture
async def store(server: StoreServer) -> AsyncIterator[RedisRunStore]:
    server.flush()
    connected = await RedisRunStore.connect(server.url, timeout_s=10)
    yield connected
    await connected.close()


@pytest.fixture
def run(store: RedisRunStore) -> Run:
    """A run that does not exist yet: begin with `await run.create(...)`."""
    return Run(store)
