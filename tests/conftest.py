"""A service and its clients for whoever asks, and the spread of tests over processes (`pytest -n`, `make test`).

Tests are spread file by file, those with engines in one process: a file keeps its servers to itself that way. SGLang
servers of different tests at a time would take a small machine's cores from each other. They would run into deadlines
that are meant for one.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import upstreams
from tests.support.rpc import Rpc, connect
from trainer_client import BufferClient, ClientOptions

if TYPE_CHECKING:
    from tests.support.service import ServiceProcess


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[ServiceProcess]":
    """A service that the tests of a module share; they must leave it serving."""
    # Not at the top: it needs packages of the service, and some tests run where only the client's are installed.
    from tests.support.service import running_service

    with running_service(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture(scope="module")
def rpc(service: "ServiceProcess") -> Iterator[Rpc]:
    """A plain protobuf client of it."""
    client = connect(service.address)
    yield client
    client.channel.close()


@pytest.fixture
def client(service: "ServiceProcess") -> Iterator[BufferClient]:
    with BufferClient(service.address, ClientOptions(timeout_s=30)) as made:
        yield made


def pytest_report_header() -> list[str]:
    return upstreams.described()


@functools.cache
def _group_of(file: Path) -> str:
    """Tell the group by its text, because the process that hands out tests imports none."""
    return "engines" if "pytest.mark.engine" in file.read_text() else str(file)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # They are the longest piece of work and so the first to begin.
    items.sort(key=lambda item: _group_of(item.path) != "engines")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group_of(config.rootpath / nodeid.partition("::")[0])

    return ByGroup(config, log)
