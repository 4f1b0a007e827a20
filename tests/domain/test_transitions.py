import pytest

from buffer_service.rules.transitions import GROUP_TRANSITIONS, NEW, TASK_TRANSITIONS, GroupState, TaskState

GROUPS_WITHOUT_EXIT = {
    GroupState.DROPPED_OVERFLOW,
    GroupState.DROPPED_STALE,
    GroupState.RECYCLED,
    GroupState.FILTERED,
    GroupState.REJECTED,
    GroupState.DISCARDED,
    GroupState.LOST,
}


@pytest.mark.parametrize(
    ("table", "states"), [(GROUP_TRANSITIONS, GroupState), (TASK_TRANSITIONS, TaskState)], ids=["groups", "tasks"]
)
def test_the_table_has_a_row_for_every_state_and_leads_to_no_other(
    table: dict[str, frozenset[str]], states: type[GroupState | TaskState]
) -> None:
    assert set(table) == {NEW, *states}
    assert frozenset().union(*table.values()) == set(states)


@pytest.mark.parametrize("state", sorted(GROUPS_WITHOUT_EXIT))
def test_a_group_that_ended_stays_ended(state: GroupState) -> None:
    assert GROUP_TRANSITIONS[state] == frozenset()


@pytest.mark.parametrize("state", sorted(set(GroupState) - GROUPS_WITHOUT_EXIT))
def test_every_other_group_can_still_end(state: GroupState) -> None:
    assert GROUP_TRANSITIONS[state]


@pytest.mark.parametrize("state", [TaskState.FAILED, TaskState.CANCELLED])
def test_a_task_that_failed_or_was_cancelled_stays_so(state: TaskState) -> None:
    assert TASK_TRANSITIONS[state] == frozenset()


def test_a_completed_task_can_only_be_started_anew() -> None:
    assert TASK_TRANSITIONS[TaskState.COMPLETED] == {TaskState.PENDING}


def test_a_trained_group_cannot_be_lost_dropped_as_stale_or_recycled() -> None:
    assert not GROUP_TRANSITIONS[GroupState.TRAINED] & {
        GroupState.LOST,
        GroupState.DROPPED_STALE,
        GroupState.RECYCLED,
    }
