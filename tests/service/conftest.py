"""One service per module, one run per test."""

from collections.abc import Iterator

import pytest

from tests.support.rpc import Rpc, connect
from tests.support.service import ServiceProcess, running_service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A service that the tests of a module share; they must leave it serving."""
    with running_service(tmp_path_factory.mktemp("service")) as service:
        yield service


@pytest.fixture(scope="module")
def rpc(service: ServiceProcess) -> Iterator[Rpc]:
    """A plain protobuf client of it."""
    client = connect(service.address)
    yield client
    client.channel.close()
