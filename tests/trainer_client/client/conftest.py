"""A scripted server, and either client of it."""

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.trainer_client.fake_service import Do, FakeService
    from trainer_client import AsyncBufferClient


@pytest.fixture
def fake() -> Iterator["FakeService"]:
    from tests.trainer_client.fake_service import FakeService

    with FakeService() as scripted:
        yield scripted


@pytest.fixture(params=["sync", "asyncio"])
def do(request: pytest.FixtureRequest, fake: "FakeService") -> Iterator["Do"]:
    from tests.trainer_client.fake_service import OPTIONS
    from trainer_client import AsyncBufferClient, BufferClient

    async def opened() -> "AsyncBufferClient":
        return AsyncBufferClient(fake.target, OPTIONS)

    if request.param == "sync":
        with BufferClient(fake.target, OPTIONS) as client:
            yield lambda method, *args, **kwargs: getattr(client, method)(*args, **kwargs)
        return
    with asyncio.Runner() as runner:
        async_client = runner.run(opened())
        yield lambda method, *args, **kwargs: runner.run(getattr(async_client, method)(*args, **kwargs))
        runner.run(async_client.close())
