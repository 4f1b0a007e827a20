"""The machine can fail: each of these subjects breaks one rule of the model, and the machine notices."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest

from tests.model.budget import explore
from tests.model.mutants.table import MUTANTS, Defect
from tests.model.notation import entry, line
from tests.model.pair import Disagreement
from tests.model.shrinking import replay, shrink
from tests.model.subjects import ModelSubject

OPERATIONS = 40_000
"""At most; most are found within a few hundred."""


class Mutant(ModelSubject):
    """A model in which one function is another while it works; the model beside it keeps the original."""

    def __init__(self, defect: Defect) -> None:
        super().__init__()
        self._change = defect.owner, defect.name, defect.replacement

    def call(
        self, operation: str, run_id: str, args: Sequence[Any], kwargs: dict[str, Any], replica: int
    ) -> tuple[Any, Any]:
        with mock.patch.object(*self._change):
            return super().call(operation, run_id, args, kwargs, replica)

    def sweep(self, run_id: str) -> None:
        with mock.patch.object(*self._change):
            super().sweep(run_id)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", MUTANTS)
def test_the_machine_finds(name: str) -> None:
    defect = MUTANTS[name]
    with pytest.raises(Disagreement):
        explore(Mutant(defect), OPERATIONS, moods=[defect.mood], shrink_s=0)


def test_a_history_that_fails_is_shortened_and_can_be_stored() -> None:
    subject = Mutant(MUTANTS["the newest group is dropped, not the oldest"])
    with pytest.raises(Disagreement) as found:
        # Of this seed it is found over a pull. One that is found over a resume needs the batch that is taken back too.
        explore(subject, OPERATIONS, moods=["steady"], shrink_s=0, seed="a")
    shorter = shrink(subject, found.value, seconds=20)
    # A run, pushes of which one drops a group, and what shows which.
    assert len(shorter.history) <= 6 < len(found.value.history)
    written = [line(one) for one in shorter.history]
    assert all(text in str(shorter) for text in written)
    with pytest.raises(Disagreement):
        replay(subject, [entry(text) for text in written])
    replay(ModelSubject(), shorter.history)
