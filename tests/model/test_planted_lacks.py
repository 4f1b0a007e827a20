"""Lacks planted in what keeps written payloads to their groups: the machine, on a real store, notices each."""

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest

from buffer_service.store.scripts import Script
from tests.model.budget import explore
from tests.model.pair import Disagreement
from tests.model.subjects import StoreSubject
from tests.support.small_parts import parts_of_bytes
from tests.support.store_server import store_server

OPERATIONS = 8_000
"""At most; they are found within some hundreds."""
OPERATIONS_IN_PARTS = 600

LACKS = {
    "nothing makes a payload permanent": ("Parts.each('PERSIST', payload)", ""),
    "any length will do": ("call('STRLEN', part) ~= part_bytes or ", ""),
    "what is not needed is left": ("Parts.each('UNLINK', payload)", ""),
    "what was blocked and rejected stays": ("Parts.each('PEXPIRE', payload, 600000)", ""),
}
"""Pieces of the script that pushes, and what is there instead."""

EACH_PART = "for _, part in ipairs(Parts.keys(payload)) do\n    call(command, part, ...)"
LACKS_OF_PARTS = {
    "only the first part is made permanent": (
        EACH_PART,
        EACH_PART.replace("do\n", "do\n if _ == 1 or command ~= 'PERSIST' then") + " end",
    ),
    "only the first part is deleted": (
        EACH_PART,
        EACH_PART.replace("do\n", "do\n if _ == 1 or command ~= 'UNLINK' then") + " end",
    ),
    "only the first part is looked for": ("    size = size - part_bytes", "    do return true end"),
}
"""The same, where payloads lie in parts."""


@pytest.fixture
def subject() -> Iterator[StoreSubject]:
    with store_server() as server:
        made = StoreSubject(server.url)
        yield made
        made.close()


@pytest.fixture
def subject_in_parts() -> Iterator[StoreSubject]:
    with store_server() as server, parts_of_bytes(4):
        made = StoreSubject(server.url)
        yield made
        made.close()


def is_noticed(subject: StoreSubject) -> None:
    with pytest.raises(Disagreement):
        explore(subject, OPERATIONS, moods=["direct"], shrink_s=0)


def plant(subject: StoreSubject, right: str, wrong: str) -> None:
    for replica in subject.replicas:
        connection: Any = replica._connection
        scripts = connection._scripts
        source = scripts["push"].source.replace(right, wrong)
        assert source != scripts["push"].source
        digest = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
        connection._scripts = {**scripts, "push": Script("push", source, digest)}


@pytest.mark.parametrize("name", LACKS)
def test_a_lack_of_the_script_is_noticed(subject: StoreSubject, name: str) -> None:
    plant(subject, *LACKS[name])
    is_noticed(subject)


def test_payloads_in_parts_are_as_the_model_has_them(subject_in_parts: StoreSubject) -> None:
    explore(subject_in_parts, OPERATIONS_IN_PARTS, moods=["direct"])


@pytest.mark.parametrize("name", LACKS_OF_PARTS)
def test_a_lack_that_shows_with_parts_is_noticed(subject_in_parts: StoreSubject, name: str) -> None:
    plant(subject_in_parts, *LACKS_OF_PARTS[name])
    is_noticed(subject_in_parts)


def test_a_write_that_takes_the_place_of_another_is_noticed(subject: StoreSubject) -> None:
    subject.written_with = ()
    is_noticed(subject)
