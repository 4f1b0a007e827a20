"""The words for on whom a run waits."""

from dataclasses import replace

import pytest

from buffer_service.domain.policy import UNSET
from buffer_service.observability.diagnosis import Standing, waits_on

IDLE = Standing(
    paused="", queued=0, needed=4, pending=0, leased=0, published_version=7, max_staleness=UNSET, engines=()
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "the feeder: no task is pending"),
        ({"paused": "store_rolled_back"}, "a resume: the run is paused (store_rolled_back)"),
        ({"queued": 4}, "the trainer: 4 groups are queued, 4 make a batch"),
        ({"leased": 1, "pending": 3}, "generation: 1 task is being generated"),
        ({"pending": 3}, "workers: no worker has leased a task"),
        ({"pending": 3, "engines": [("stopped", 7)]}, "workers: no worker has leased a task"),
        ({"pending": 3, "engines": [("ready", 0)]}, "workers: no worker has leased a task"),
        ({"pending": 3, "engines": [("quarantined", 7)]}, "weights: 1 engine is quarantined, none is left"),
        (
            {"pending": 3, "engines": [("ready", 4), ("loading", 2)], "max_staleness": 2},
            "weights: the newest engine has loaded version 4 and the next batch needs 5",
        ),
        ({"pending": 3, "engines": [("ready", 5)], "max_staleness": 2}, "workers: no worker has leased a task"),
    ],
    ids=str,
)
def test_whoever_is_waited_on_is_named(changes: dict[str, object], words: str) -> None:
    assert waits_on(replace(IDLE, **changes)) == words  # type: ignore[arg-type]
