"""The store's scripts and the reference model agree on everything that can be seen, over random histories."""

import pytest

from tests.model.budget import OPERATIONS, explore
from tests.model.outcomes import missing
from tests.model.subjects import StoreSubject

ENOUGH_FOR_EVERY_OUTCOME = 8_000


@pytest.mark.timeout(3_600)
def test_the_store_does_what_the_model_does(store: StoreSubject) -> None:
    seen = explore(store, OPERATIONS)
    print("\n".join(f"{name} {seen[name]}" for name in sorted(seen)))
    assert seen["operations"] >= OPERATIONS
    assert OPERATIONS < ENOUGH_FOR_EVERY_OUTCOME or missing(seen) == []
