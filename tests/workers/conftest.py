"""The fake of the service, and the real one for tests with worker processes."""

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import pytest

from tests.workers.fake_service import FakeService
from trainer_client import BufferClient, ClientOptions

if TYPE_CHECKING:
    from tests.support.service import ServiceProcess


@pytest.fixture
async def fake() -> AsyncIterator[FakeService]:
    service = FakeService()
    await service.start()
    yield service
    await service.stop()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[ServiceProcess]":
    # Not at the top: it needs packages of the service, and test_verifiers runs where only the worker's are installed.
    from tests.support.service import running_service

    with running_service(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture
def client(service: "ServiceProcess") -> Iterator[BufferClient]:
    with BufferClient(service.address, ClientOptions(timeout_s=60)) as made:
        yield made


@pytest.fixture
def run_id(request: pytest.FixtureRequest) -> str:
    return "".join(c if c.isalnum() else "-" for c in request.node.name)[:60].rstrip("-")
