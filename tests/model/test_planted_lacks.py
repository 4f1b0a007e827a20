"""Lacks planted in what keeps written payloads to their groups: the machine, on a real store, notices each."""

import hashlib
from collections.abc import Iterator

import pytest

from buffer_service.store.scripts import Script
from tests.model.budget import explore
from tests.model.pair import Disagreement
from tests.model.subjects import StoreSubject
from tests.support.store_server import store_server

OPERATIONS = 8_000
"""At most; they are found within some hundreds."""

LACKS = {
    "nothing makes a payload permanent": ("call('PERSIST', payload)", "call('EXISTS', payload)"),
    "any length will do": ("call('STRLEN', payload) == size and ", ""),
    "what is not needed is left": ("call('UNLINK', payload)", "call('EXISTS', payload)"),
    "what was blocked and rejected stays": ("call('PEXPIRE', payload, 600000)", "call('EXISTS', payload)"),
}
"""Parts of the script that pushes, and what is there instead."""


@pytest.fixture
def subject() -> Iterator[StoreSubject]:
    with store_server() as server:
        made = StoreSubject(server.url)
        yield made
        made.close()


def is_noticed(subject: StoreSubject) -> None:
    with pytest.raises(Disagreement):
        explore(subject, OPERATIONS, moods=["direct"], shrink_s=0)


@pytest.mark.parametrize("name", LACKS)
def test_a_lack_of_the_script_is_noticed(subject: StoreSubject, name: str) -> None:
    right, wrong = LACKS[name]
    for replica in subject.replicas:
        scripts = replica._connection._scripts
        source = scripts["push"].source.replace(right, wrong)
        assert source != scripts["push"].source
        digest = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
        replica._connection._scripts = {**scripts, "push": Script("push", source, digest)}
    is_noticed(subject)


def test_a_write_that_takes_the_place_of_another_is_noticed(subject: StoreSubject) -> None:
    subject.written_with = ()
    is_noticed(subject)
