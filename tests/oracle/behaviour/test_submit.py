import pytest

from buffer_service.domain import ops
from buffer_wire.errors import CursorConflict, InvalidField, PendingFull, RunPaused, StaleTerm
from tests.oracle.behaviour.world import RUN, World


def submit(world: World, **changes: object) -> ops.Submitted:
    fields: dict[str, object] = {
        "term": world.term,
        "request_id": world.new_request(),
        "expected_cursor": world.view.cursor,
        "cursor": world.view.cursor + 1,
        "feeder_state": b"",
        "tasks": [ops.NewTask("a", 2, 0, "math", b"")],
    }
    return world.do(world.model.submit, ops.Submit(**{**fields, **changes}))  # type: ignore[arg-type]


def test_submitted_tasks_are_pending_and_move_the_cursor() -> None:
    world = World()
    reply = world.submit("a", "b")
    assert (list(reply.task_ids), reply.pending, reply.cursor) == (["a", "b"], 2, 2)
    assert world.tasks("submitted") == world.tasks("pending") == 2
    assert world.resume().feeder_state == b"state"


def test_an_empty_id_is_taken_from_the_sequence() -> None:
    world = World()
    world.submit("a")
    assert list(world.submit("", "b", "").task_ids) == ["t00000002", "b", "t00000004"]


def test_a_repeat_gets_the_first_reply_and_adds_nothing() -> None:
    world = World()
    first = world.submit("a", "b", request_id="again")
    world.lease()
    repeat = world.submit("c", request_id="again")
    assert (repeat.task_ids, repeat.cursor, repeat.pending) == (first.task_ids, first.cursor, first.pending)
    assert repeat.revision == world.view.revision > first.revision
    assert world.tasks("submitted") == 2


def test_only_the_last_request_is_a_repeat() -> None:
    world = World()
    world.submit("a", request_id="one")
    world.submit("b", request_id="two")
    with pytest.raises(InvalidField):
        world.submit("a", request_id="one")


def test_a_cursor_that_another_feeder_moved_is_a_conflict() -> None:
    world = World()
    world.submit("a")
    with pytest.raises(CursorConflict) as refused:
        submit(world, expected_cursor=0)
    assert refused.value.attributes == {"expected_cursor": "0", "cursor": "1"}
    assert world.tasks("submitted") == 1


def test_pending_tasks_are_capped_with_those_that_back_off() -> None:
    world = World(max_pending_tasks=2)
    world.submit("a")
    world.fail(world.lease_one().lease_id)
    with pytest.raises(PendingFull) as refused:
        world.submit("b", "c")
    assert refused.value.attributes == {"pending": "1", "limit": "2"}
    world.submit("b")


@pytest.mark.parametrize("task_ids", [("b", "a"), ("b", "c", "b")])
def test_an_id_that_is_not_new_refuses_all_of_the_request(task_ids: tuple[str, ...]) -> None:
    world = World()
    world.submit("a")
    before = world.view
    with pytest.raises(InvalidField, match="new to the run") as refused:
        world.submit(*task_ids)
    assert refused.value.attributes["field"] == f"tasks[{len(task_ids) - 1}].task_id"
    assert world.view == before


def test_a_tombstone_keeps_its_id_until_the_checkpoint() -> None:
    world = World(batch_groups=1)
    world.submit("a")
    world.push(world.lease_one())
    world.batch()
    world.commit(0)
    with pytest.raises(InvalidField):
        world.submit("a")
    world.checkpoint(0)
    world.submit("a")


def test_a_superseded_trainer_cannot_submit() -> None:
    world = World()
    world.resume()
    with pytest.raises(StaleTerm) as refused:
        submit(world, term=1)
    assert refused.value.attributes == {"term": "1", "current": "2"}


def test_a_paused_run_takes_no_tasks() -> None:
    world = World(max_attempts=1, failure_budget=0)
    world.submit("a")
    world.fail_for_good()
    with pytest.raises(RunPaused, match="failure_budget_exceeded"):
        submit(world)


def test_the_term_is_checked_before_the_pause() -> None:
    world = World(max_attempts=1, failure_budget=0)
    world.submit("a")
    world.fail_for_good()
    with pytest.raises(StaleTerm):
        submit(world, term=7)


def test_a_repeat_is_told_of_the_pause_like_everybody_else() -> None:
    world = World(max_attempts=1, failure_budget=0)
    world.submit("a", request_id="again")
    world.fail_for_good()
    with pytest.raises(RunPaused):
        submit(world, request_id="again")
    assert world.model.view(RUN).tasks["submitted"] == 1
