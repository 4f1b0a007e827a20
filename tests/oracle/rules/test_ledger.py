import itertools

import pytest

from buffer_service.domain.ops import Amount
from buffer_service.rules.transitions import GROUP_TRANSITIONS, NEW, TASK_TRANSITIONS, GroupState, TaskState
from tests.oracle.rules.ledger import GroupLedger, IllegalTransition, TaskLedger

SIZE = Amount(groups=1, samples=4, tokens=30, bytes=500)


def test_accepting_a_group_raises_accepted_and_its_state() -> None:
    ledger = GroupLedger()
    ledger.move("a/0", SIZE, NEW, GroupState.QUEUED)
    assert ledger.entries()["accepted"] == ledger.entries()[GroupState.QUEUED] == SIZE
    assert ledger.balanced()


def test_a_group_is_in_one_state_at_a_time() -> None:
    ledger = GroupLedger()
    for source, target in itertools.pairwise([NEW, GroupState.QUEUED, GroupState.DELIVERED, GroupState.TRAINED]):
        ledger.move("a/0", SIZE, source, GroupState(target))
        assert ledger.balanced()
        assert [name for name, amount in ledger.states.items() if amount != Amount()] == [target]


ILLEGAL_GROUP_MOVES = [
    (source, target) for source in GROUP_TRANSITIONS for target in GroupState if target not in GROUP_TRANSITIONS[source]
]
ILLEGAL_TASK_MOVES = [
    (source, target) for source in TASK_TRANSITIONS for target in TaskState if target not in TASK_TRANSITIONS[source]
]


@pytest.mark.parametrize(("source", "target"), ILLEGAL_GROUP_MOVES)
def test_the_group_ledger_refuses_what_the_table_does_not_have_and_changes_nothing(
    source: str, target: GroupState
) -> None:
    ledger = GroupLedger()
    with pytest.raises(IllegalTransition, match=f"group a/0 cannot go from {source} to {target}"):
        ledger.move("a/0", SIZE, source, target)
    assert ledger == GroupLedger()


@pytest.mark.parametrize(("source", "target"), ILLEGAL_TASK_MOVES)
def test_the_task_ledger_refuses_what_the_table_does_not_have_and_changes_nothing(
    source: str, target: TaskState
) -> None:
    ledger = TaskLedger()
    with pytest.raises(IllegalTransition, match=f"task a cannot go from {source} to {target}"):
        ledger.move("a", source, target)
    assert ledger == TaskLedger()


def test_a_lost_entry_unbalances_the_ledgers() -> None:
    groups, tasks = GroupLedger(), TaskLedger()
    groups.move("a/0", SIZE, NEW, GroupState.QUEUED)
    tasks.move("a", NEW, TaskState.PENDING)
    groups.states[GroupState.QUEUED] = Amount(groups=1, samples=4, tokens=29, bytes=500)
    tasks.states[TaskState.PENDING] = 0
    assert not groups.balanced()
    assert not tasks.balanced()
