"""A fake of the service, and a run for each test."""

from collections.abc import AsyncIterator

import pytest

from tests.workers.fake_service import FakeService


@pytest.fixture
async def fake() -> AsyncIterator[FakeService]:
    service = FakeService()
    await service.start()
    yield service
    await service.stop()


@pytest.fixture
def run_id(request: pytest.FixtureRequest) -> str:
    return "".join(c if c.isalnum() else "-" for c in request.node.name)[:60].rstrip("-")
