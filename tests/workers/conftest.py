from collections.abc import AsyncIterator

import pytest

from tests.workers.fake_service import FakeService


@pytest.fixture
async def fake() -> AsyncIterator[FakeService]:
    service = FakeService()
    await service.start()
    yield service
    await service.stop()
