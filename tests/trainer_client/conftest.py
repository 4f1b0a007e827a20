"""A real service for the tests that need one; nothing here is imported where only the core is installed."""

import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.service import ServiceProcess


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator["ServiceProcess"]:
    from tests.support.service import running_service

    with running_service(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture
def run_id(request: pytest.FixtureRequest) -> str:
    """A run of the test's own on the shared service."""
    name: str = request.node.name
    return f"{zlib.crc32(name.encode()):08x}-" + "".join(c if c.isalnum() else "-" for c in name)[:50]
