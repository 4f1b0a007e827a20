"""Histories that failed once: model and store agree on every one of them, on both kinds of server."""

import json
from pathlib import Path

import pytest

from tests.model.hints import HintedPair
from tests.model.keep import HISTORIES
from tests.model.notation import Entry, entry
from tests.model.shrinking import replay
from tests.model.subjects import StoreSubject

STORED = sorted(HISTORIES.glob("*.jsonl"))


def read(path: Path) -> list[Entry]:
    about, *history = path.read_text().splitlines()
    assert json.loads(about)["about"]
    return [entry(text) for text in history]


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_valkey_does_what_the_model_does(valkey: StoreSubject, path: Path) -> None:
    replay(valkey, read(path), HintedPair)


@pytest.mark.redis7
@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_redis_7_does_what_the_model_does(redis_7: StoreSubject, path: Path) -> None:
    replay(redis_7, read(path))
