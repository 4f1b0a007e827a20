"""The store's scripts and the reference model agree on everything that can be seen, over random histories."""

from collections.abc import Iterator

import pytest

from tests.model.budget import OPERATIONS, explore
from tests.model.outcomes import missing
from tests.model.subjects import StoreSubject
from tests.support.store_server import store_server

ENOUGH_FOR_EVERY_OUTCOME = 5_000


@pytest.fixture
def store() -> Iterator[StoreSubject]:
    with store_server() as server:
        subject = StoreSubject(server.url)
        yield subject
        subject.close()


@pytest.mark.timeout(3_600)
def test_the_store_does_what_the_model_does(store: StoreSubject) -> None:
    seen = explore(store, OPERATIONS)
    print("\n".join(f"{name} {seen[name]}" for name in sorted(seen)))
    assert seen["operations"] >= OPERATIONS
    assert OPERATIONS < ENOUGH_FOR_EVERY_OUTCOME or missing(seen) == []
