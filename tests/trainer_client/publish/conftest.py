"""Two engines that follow broadcast updates, and a publisher for them."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.trainer_client.fleet import Fleet
    from trainer_client.publish import CollectivePublisher


@pytest.fixture(scope="module")
def started() -> Iterator["Fleet"]:
    from tests.trainer_client.fleet import fleet_of

    with fleet_of("e0", "e1") as fleet:
        yield fleet


@pytest.fixture
def fleet(started: "Fleet") -> "Fleet":
    """Two engines that live; whatever befell them in an earlier test is undone."""
    from tests.trainer_client.fleet import Fleet

    for engine in started.engines:
        engine.settle()
        if engine.engine.process.poll() is not None:
            engine.restart()
        engine.mute, engine.state, engine.on_phase = False, "ready", lambda _: None
        engine.takes_buckets = True
        engine.received.clear()
        engine.reported_at = time.monotonic()
    return Fleet(*started.engines)


@pytest.fixture
def publisher() -> Iterator["CollectivePublisher"]:
    from tests.trainer_client.publish.broadcasts import SLACK_S, TIMEOUT_S
    from trainer_client.publish import CollectivePublisher

    with CollectivePublisher(timeout_s=TIMEOUT_S, slack_s=SLACK_S) as made:
        yield made
