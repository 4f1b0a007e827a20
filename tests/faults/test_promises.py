"""The checker of histories finds what it is for: each change to a history that keeps every promise breaks one."""

from pathlib import Path

import pytest

from tests.chaos.checker.promises import broken
from tests.faults.changes import CHANGES, Change, calls
from tests.faults.changes_of_groups import lose_the_second_step
from tests.faults.changes_of_leases import a_lost_lease_is_extended
from tests.faults.history import History
from tests.faults.tale import told


def test_the_tale_keeps_every_promise() -> None:
    assert broken(told()) == []


@pytest.mark.parametrize(
    ("promise", "change"),
    [(promise, change) for promise, changes in CHANGES.items() for change in changes],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_history_that_breaks_a_promise_is_found(promise: str, change: Change) -> None:
    history = told()
    change(history)
    assert [problem for problem in broken(history) if problem.startswith(f"{promise}: ")], broken(history)


def test_every_promise_can_be_broken() -> None:
    assert [promise for promise, changes in CHANGES.items() if not changes] == []


def test_a_kept_history_reads_as_it_was_written(tmp_path: Path) -> None:
    history = told()
    again = History.load(history.save(tmp_path / "history.jsonl"))
    assert again.ops == history.ops
    assert again.now == history.now
    a_lost_lease_is_extended(again)
    assert broken(again) != broken(history)


def test_losses_must_be_told() -> None:
    history = told()
    lose_the_second_step(history, told_so=False)
    assert broken(history) == ["acknowledged_groups_are_kept: 2 acknowledged groups are lost, and nobody was told"]


def test_losses_that_were_told_are_no_breach_where_they_may_happen() -> None:
    history = told()
    lose_the_second_step(history, told_so=True)
    assert broken(history) == []
    (failover,) = calls(history, "failover")
    failover.given["loses"] = False
    assert any("is nowhere" in problem for problem in broken(history))
