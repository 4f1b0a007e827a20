"""A store of its own for the tests that run it beside the model."""

from collections.abc import Iterator

import pytest

from tests.model.subjects import StoreSubject
from tests.support.store_server import store_server


@pytest.fixture
def store() -> Iterator[StoreSubject]:
    with store_server() as server:
        subject = StoreSubject(server.url)
        yield subject
        subject.close()
