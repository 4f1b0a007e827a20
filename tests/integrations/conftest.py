"""A service for each module, a client of it, and a run for each test."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.recorded_groups import write_recorded_model
from tests.support.service import ServiceProcess, running_service
from trainer_client import BufferClient, ClientOptions


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with running_service(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture
def client(service: ServiceProcess) -> Iterator[BufferClient]:
    with BufferClient(service.address, ClientOptions(timeout_s=30)) as connected:
        yield connected


@pytest.fixture
def run_id(tmp_path: Path) -> str:
    """A run's name; the model that the recorded groups are of lies in tmp_path/model."""
    write_recorded_model(tmp_path / "model")
    return re.sub(r"[^A-Za-z0-9]+", "-", tmp_path.name)
