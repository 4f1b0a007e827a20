"""An operator's switches: pause, drain, continue, delete."""

from collections.abc import Callable

import pytest

from buffer_service.domain import ops
from buffer_service.domain.ops import LeaseWait, PushKind, WeightVersion
from buffer_service.domain.policy import RunPolicy
from buffer_wire.errors import RunPaused, StoreRolledBack, UnknownRun
from tests.oracle.behaviour.world import RUN, World
from tests.oracle.rules.proofs import prove


def pause(world: World) -> int:
    return world.do(world.model.pause_run)


def drain(world: World) -> int:
    return world.do(world.model.drain_run)


def go_on(world: World) -> int:
    return world.do(world.model.continue_run)


# ── pause ──


def test_a_held_run_starts_nothing_and_finishes_what_is_under_way() -> None:
    world = World(batch_groups=1, max_queued_groups=9)
    world.queue(2)
    world.batch()
    world.submit("a", "b", "c")
    first, second = world.lease(2).grants
    pause(world)
    assert world.view.paused == "operator"
    assert world.model.weights(RUN).paused
    assert world.lease().wait is LeaseWait.PAUSED
    for attempt in (lambda: world.submit("d"), world.pull):
        with pytest.raises(RunPaused, match="operator"):
            attempt()
    assert world.batch(0).replayed
    assert world.extend(first.lease_id) == [ops.LeaseState.LIVE]
    assert world.interrupt(first.lease_id) is ops.ReturnOutcome.PENDING
    assert world.push(second) is PushKind.QUEUED
    assert world.publish(1, commit=0).committed_steps == 1
    assert world.checkpoint(0) == 1
    assert world.resume().next_step == 1
    assert world.view.paused == "operator", "a trainer does not undo an operator"
    go_on(world)
    assert (world.view.paused, len(world.lease(3).grants)) == ("", 2)


def test_a_pause_outranks_a_failure_budget_and_a_rolled_back_store_outranks_both() -> None:
    world = World(max_attempts=1, failure_budget=0)
    world.submit("a")
    world.fail_for_good()
    pause(world)
    assert world.view.paused == "operator"
    with pytest.raises(RunPaused, match="operator"):
        world.pull()
    with pytest.raises(StoreRolledBack):
        world.model.extend(RUN, "worker", "process-1", [], seen_revision=prove("", 1_000))
    assert world.view.paused == "store_rolled_back"
    go_on(world)
    assert world.view.paused == "store_rolled_back"
    world.resume()
    assert world.view.paused == "failure_budget_exceeded"


def test_switches_survive_a_rolled_back_store() -> None:
    world = World()
    with pytest.raises(StoreRolledBack):
        world.model.extend(RUN, "worker", "process-1", [], seen_revision=prove("", 1_000))
    pause(world)
    drain(world)
    world.resume()
    assert (world.view.paused, world.view.draining) == ("operator", True)


@pytest.mark.parametrize("switch", [pause, drain])
def test_a_switch_raises_the_revision_when_it_changes_something(switch: Callable[[World], int]) -> None:
    world = World()
    before = world.view.revision
    assert [switch(world), switch(world)] == [before + 1, before + 1]
    assert [go_on(world), go_on(world)] == [before + 2, before + 2]


# ── drain ──


def test_a_draining_run_takes_no_tasks_and_leases_none() -> None:
    world = World(batch_groups=1)
    world.submit("a", "b")
    first = world.lease(request_id="before")
    drain(world)
    assert (world.view.draining, world.view.paused, world.model.weights(RUN).paused) == (True, "", False)
    with pytest.raises(RunPaused, match="draining"):
        world.submit("c")
    assert world.lease().wait is LeaseWait.DRAINING
    assert world.lease(request_id="before").grants == first.grants
    engine = ops.EngineReport("engine", "worker", "quarantined", WeightVersion(1, 0), 0, 0, "", 0)
    world.do(world.model.report_engine, engine)
    assert world.lease().wait is LeaseWait.DRAINING
    pause(world)
    assert world.lease().wait is LeaseWait.PAUSED
    go_on(world)
    assert world.lease().wait is LeaseWait.QUARANTINED


def test_a_repeated_submit_is_told_of_the_drain_like_every_other() -> None:
    world = World()
    world.submit("a", request_id="again")
    drain(world)
    with pytest.raises(RunPaused, match="draining"):
        world.submit("a", request_id="again")


def test_a_drained_run_says_so_when_nothing_more_can_come() -> None:
    world = World(batch_groups=2, overflow_action="block")
    world.submit("a", "b")
    grants = world.lease(2).grants
    world.push(grants[0])
    drain(world)
    assert isinstance(world.pull(), ops.Short), "a lease is out"
    world.push(grants[1])
    assert world.batch().total_groups == 2
    world.queue(1)
    with pytest.raises(RunPaused) as refused:
        world.pull()
    assert refused.value.attributes["why"] == "drained"
    assert world.batch(0).replayed
    go_on(world)
    assert isinstance(world.pull(), ops.Short)


def test_pending_tasks_do_not_keep_a_draining_run_from_its_end() -> None:
    world = World(batch_groups=1)
    world.submit("a")
    drain(world)
    with pytest.raises(RunPaused, match="drained"):
        world.pull()


def test_a_push_that_waits_in_line_is_waited_for() -> None:
    world = World(batch_groups=2, max_queued_groups=2, max_queued_tokens=100, overflow_action="block")
    world.queue(1, tokens=90)
    facts = world.facts("late", tokens=20)
    (blocked,) = world.push_facts(facts)
    drain(world)
    assert isinstance(world.pull(), ops.Short)
    world.do(world.model.abandon_push, [blocked.payload_key])
    with pytest.raises(RunPaused, match="drained"):
        world.pull()


def test_what_was_evicted_stays_evicted_when_the_run_is_drained() -> None:
    world = World(batch_groups=1, max_staleness=0)
    world.queue(1)
    drain(world)
    before = world.view.revision
    with pytest.raises(RunPaused, match="drained"):
        world.pull(train_version=1)
    assert (world.groups("dropped_stale"), world.view.revision) == (1, before + 1)


# ── delete ──


def test_a_deleted_run_is_unknown_to_everything_and_its_name_is_free() -> None:
    world = World(batch_groups=1)
    world.submit("a")
    world.queue(1)
    world.model.delete_run(RUN)
    assert world.model.list_runs() == []
    for attempt in (
        lambda: world.model.view(RUN),
        lambda: world.model.delete_run(RUN),
        lambda: world.model.pause_run(RUN),
        lambda: world.model.records(RUN, "", 10),
        lambda: world.model.fetch(RUN, []),
    ):
        with pytest.raises(UnknownRun):
            attempt()
    view, created = world.model.create_run(RUN, RunPolicy(batch_groups=3))
    assert (created, view.tasks["submitted"], view.groups["accepted"].groups, view.cursor) == (True, 0, 0, 0)


def test_runs_are_apart() -> None:
    world = World(batch_groups=1)
    world.model.create_run("other", RunPolicy(batch_groups=1))
    world.queue(1)
    pause(world)
    other = world.model.view("other")
    assert (other.paused, other.groups["queued"].groups) == ("", 0)
    world.model.delete_run("other")
    assert world.groups("queued") == 1
