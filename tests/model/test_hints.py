"""Nobody waits for longer than the state makes them wait: the store hints at whatever ends a wait."""

import pytest

from tests.model.budget import TIMES, explore
from tests.model.hints import HintedPair
from tests.model.subjects import StoreSubject

OPERATIONS = int(3_000 * TIMES)


@pytest.mark.timeout(1_800)
def test_whoever_waits_is_told_when_the_wait_can_end(valkey: StoreSubject) -> None:
    seen = explore(valkey, OPERATIONS, kind=HintedPair, seed="hints")
    # Groups of stages, turns to load, and room for pushes that wait, come seldom in the others.
    seen += explore(valkey, OPERATIONS // 3, moods=["rolling", "standing in line"], kind=HintedPair, seed="hints")
    seen += explore(valkey, OPERATIONS // 6, moods=["waiting", "in order"], kind=HintedPair, seed="hints")
    seen += explore(valkey, OPERATIONS // 6, moods=["staged"], kind=HintedPair, seed="hints")
    print("\n".join(f"{name} {seen[name]}" for name in sorted(seen) if name.startswith("hint")))
    assert seen["operations"] >= OPERATIONS
    assert (
        min(seen["hint:groups"], seen["hint:tasks"], seen["hint:space"], seen["hint:weights"], seen["hint:stages"]) > 0
    )
