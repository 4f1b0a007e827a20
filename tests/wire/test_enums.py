"""Enums of the wire and of Python have the same words; one that differs is found when it is first used."""

from enum import StrEnum
from typing import get_args

import pytest

from buffer_service.domain.policy import OverflowAction
from buffer_wire.enums import members, numbers, words
from rollout_buffer.v1 import runs_pb2 as pb
from trainer_client import policy

ACTIONS = pb.OverflowAction


class Fewer(StrEnum):
    DROP_OLDEST = "drop_oldest"
    BLOCK = "block"


class More(StrEnum):
    DROP_OLDEST = "drop_oldest"
    BLOCK = "block"
    REJECT = "reject"
    DROP_STALEST = "drop_stalest"


def test_a_word_is_a_value_without_its_prefix() -> None:
    assert words(ACTIONS) == {
        "drop_oldest": pb.OVERFLOW_ACTION_DROP_OLDEST,
        "block": pb.OVERFLOW_ACTION_BLOCK,
        "reject": pb.OVERFLOW_ACTION_REJECT,
    }


def test_members_and_numbers_are_each_others_inverse() -> None:
    assert members(ACTIONS, OverflowAction) == {
        number: member for member, number in numbers(ACTIONS, OverflowAction).items()
    }


@pytest.mark.parametrize("kind", [Fewer, More])
def test_enums_with_other_words_are_refused(kind: type[StrEnum]) -> None:
    with pytest.raises((KeyError, ValueError), match=r"reject|drop_stalest"):
        members(ACTIONS, kind)


@pytest.mark.parametrize("name", ["OverflowAction", "StaleAction", "StalenessMeasure", "Order"])
def test_the_clients_literals_are_the_words_of_the_wire(name: str) -> None:
    assert get_args(getattr(policy, name)) == tuple(words(getattr(pb, name)))
