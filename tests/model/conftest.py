"""A store of its own for the tests that run it beside the model."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from buffer_service.domain.ops import groups
from buffer_service.store import scripts
from buffer_service.store.embedded.binary import find_binary
from tests.model.subjects import StoreSubject
from tests.support.store_cluster import store_cluster
from tests.support.store_server import store_server


@pytest.fixture(scope="package", autouse=True)
def few_are_remembered() -> Iterator[None]:
    """So few forgotten tasks that histories get beyond them."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(groups, "REMEMBERED_TASKS", 4)
        _load_again()
        yield
    _load_again()


def _load_again() -> None:
    scripts.expanded.cache_clear()
    scripts._load_scripts.cache_clear()


def _subject(binary: Path | None) -> Iterator[StoreSubject]:
    with store_server(binary=binary) as server:
        subject = StoreSubject(server.url)
        yield subject
        subject.close()


@pytest.fixture(scope="module")
def store() -> Iterator[StoreSubject]:
    yield from _subject(None)


@pytest.fixture(scope="module")
def on_cluster() -> Iterator[StoreSubject]:
    with store_server() as server, store_cluster(replicas=0) as cluster:
        subject = StoreSubject(server.url, cluster)
        yield subject
        subject.close()


@pytest.fixture(scope="module")
def all_on_cluster() -> Iterator[StoreSubject]:
    with store_cluster(replicas=0) as cluster:
        subject = StoreSubject("", cluster)
        yield subject
        subject.close()


@pytest.fixture(scope="module")
def valkey() -> Iterator[StoreSubject]:
    binary = find_binary()
    if binary.name != "valkey-server":
        pytest.skip(f"there is no valkey-server: {binary} would run instead")
    yield from _subject(binary)


@pytest.fixture(scope="module")
def redis_7() -> Iterator[StoreSubject]:
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("there is no redis-server on PATH")
    yield from _subject(Path(binary))
