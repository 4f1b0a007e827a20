"""One private server of each kind for a module, emptied for every test."""

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from buffer_service.store.redis_store import RedisRunStore
from tests.support.store_server import StoreServer, store_server

BINARIES = ["", pytest.param("redis-server", marks=pytest.mark.redis7)]
"""Binaries of the default store, and of Redis."""


@pytest.fixture(scope="module", params=BINARIES)
def server(request: pytest.FixtureRequest) -> Iterator[StoreServer]:
    binary = shutil.which(request.param) if request.param else None
    if request.param and binary is None:
        pytest.skip(f"no {request.param} on PATH")
    with store_server(binary=Path(binary) if binary else None) as running:
        yield running


@pytest.fixture
async def store(server: StoreServer) -> AsyncIterator[RedisRunStore]:
    server.flush()
    connected = await RedisRunStore.connect(server.url, timeout_s=10)
    yield connected
    await connected.close()
