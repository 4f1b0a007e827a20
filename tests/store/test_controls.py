"""Pausing, draining and recording: what an operator does to a run."""

import pytest

from buffer_service import commands
from buffer_service.commands.replies import text, unpack
from buffer_service.domain import ops
from buffer_service.domain.policy import OverflowAction, RunPolicy, StaleAction
from buffer_wire.errors import FailureBudgetExceeded, InvalidField, RunPaused, StoreRolledBack
from tests.store.driver import Run


async def test_a_paused_run_starts_nothing_and_ends_what_is_under_way(run: Run) -> None:
    await run.create(max_queued_groups=4)
    await run.submit("a", "b", "c")
    a, b = (await run.lease(2)).grants
    await run.fill("x", "y", "z")
    before = await run.batch(0)
    revision = await run.store.call(commands.pause_run(run.run_id))
    view = await run.view()
    assert (view.paused, view.draining, view.revision) == ("operator", False, revision)
    assert (await run.store.call(commands.weights(run.run_id))).paused
    with pytest.raises(RunPaused, match="operator"):
        await run.submit("d")
    assert (await run.lease()).wait is ops.LeaseWait.PAUSED
    with pytest.raises(RunPaused, match="operator"):
        await run.pull(1)
    assert (await run.batch(0)).shard == before.shard
    assert await run.push_kinds(run.group(a)) == ["queued"]
    extended = await run.store.call(commands.extend(run.run_id, "w", "i", [b.lease_id]))
    assert list(extended.states) == [ops.LeaseState.LIVE]
    assert await run.give_back(b) == ["pending"]
    assert (await run.publish(1, commit_through=0)).committed_steps == 1
    assert (await run.checkpoint(0))[1] == 1
    assert (await run.resume()).term == 2
    assert (await run.view()).paused == "operator"

    assert await run.store.call(commands.continue_run(run.run_id)) == (await run.view()).revision
    assert (await run.view()).paused == ""
    assert (await run.batch(1)).total_groups == 2
    assert len((await run.lease(3)).grants) == 2
    await run.check()


async def test_controls_that_change_nothing_leave_the_revision(run: Run) -> None:
    await run.create()
    assert await run.store.call(commands.continue_run(run.run_id)) == 1
    assert [await run.store.call(commands.pause_run(run.run_id)) for _ in range(2)] == [2, 2]
    assert [await run.store.call(commands.drain_run(run.run_id)) for _ in range(2)] == [3, 3]
    assert [await run.store.call(commands.continue_run(run.run_id)) for _ in range(2)] == [4, 4]


async def test_a_drained_run_gives_out_what_it_has_and_then_says_that_it_is_empty(run: Run) -> None:
    await run.create(max_queued_groups=9)
    await run.submit("a", "b", "c")
    a = await run.one_lease(request_id="first")
    await run.store.call(commands.drain_run(run.run_id))
    view = await run.view()
    assert (view.paused, view.draining) == ("", True)
    assert not (await run.store.call(commands.weights(run.run_id))).paused
    with pytest.raises(RunPaused, match="draining"):
        await run.submit("d")
    assert (await run.lease()).wait is ops.LeaseWait.DRAINING
    again = await run.lease(request_id="first")
    assert [grant.lease_id for grant in again.grants] == [a.lease_id]
    await run.fill("x")
    # One more group is being generated: the pull waits for it.
    assert (await run.short(0)).leased == 1
    assert await run.push_kinds(run.group(a)) == ["queued"]
    assert (await run.batch(0)).final
    await run.fill("y")
    with pytest.raises(RunPaused, match="drained"):
        await run.pull(1)
    assert await run.ledger() == {"accepted": 3, "queued": 1, "delivered": 2}
    await run.store.call(commands.continue_run(run.run_id))
    assert (await run.short(1)).pending == 2


async def test_a_drained_run_waits_for_blocked_pushes(run: Run) -> None:
    await run.create(
        batch_groups=2, max_queued_groups=2, max_queued_bytes=1 << 20, overflow_action=OverflowAction.BLOCK
    )
    big = [run.group(name, size=600_000) for name in ("a", "b")]
    queued, blocked = await run.push(*big)
    assert (queued.kind, blocked.kind) == (ops.PushKind.QUEUED, ops.PushKind.BLOCKED)
    await run.store.call(commands.drain_run(run.run_id))
    assert (await run.short(0)).queued == 1
    await run.store.call(commands.abandon_push(run.run_id, [blocked.payload_key]))
    with pytest.raises(RunPaused, match="drained"):
        await run.pull(0)


async def test_a_drained_run_does_not_wait_for_pushes_that_nobody_comes_for(run: Run) -> None:
    await run.create(overflow_action=OverflowAction.BLOCK)
    await run.fill("a", "b")
    (blocked,) = await run.push(run.group("c"))
    await run.store.call(commands.drain_run(run.run_id))
    await run.batch(0)
    await run.pass_ms(3_000)
    assert (await run.short(1)).queued == 0
    await run.pass_ms(1)
    with pytest.raises(RunPaused, match="drained"):
        await run.pull(1)
    assert await run.members("waiting") == []
    await run.store.call(commands.abandon_push(run.run_id, [blocked.payload_key]))
    await run.check()


async def test_eviction_by_the_pull_that_finds_a_run_drained_stays(run: Run) -> None:
    await run.create(max_staleness=1, stale_action=StaleAction.RECYCLE)
    await run.submit("a")
    await run.push(run.group(await run.one_lease()))
    await run.store.call(commands.drain_run(run.run_id))
    before = (await run.view()).revision
    with pytest.raises(RunPaused, match="drained"):
        await run.pull(0, train_version=5)
    assert await run.ledger() == {"accepted": 1, "recycled": 1}
    assert (await run.view()).revision == before + 1
    await run.check()


async def test_a_trainers_resume_leaves_a_drain_as_it_is(run: Run) -> None:
    await run.create()
    await run.store.call(commands.drain_run(run.run_id))
    await run.resume()
    assert (await run.view()).draining


async def test_the_operator_outranks_the_failure_budget_and_a_roll_back_outranks_both(run: Run) -> None:
    await run.create(failure_budget=0, max_attempts=1)
    await run.submit("a")
    await run.give_back(await run.one_lease(), kind=ops.ReturnKind.FAILED)
    assert (await run.view()).paused == "failure_budget_exceeded"
    await run.store.call(commands.pause_run(run.run_id))
    assert (await run.view()).paused == "operator"
    await run.store.call(commands.continue_run(run.run_id))
    with pytest.raises(FailureBudgetExceeded):
        await run.pull(0)
    with pytest.raises(StoreRolledBack):
        await run.pull(0, seen=1000)
    await run.store.call(commands.pause_run(run.run_id))
    assert (await run.view()).paused == "store_rolled_back"
    await run.resume()
    assert (await run.view()).paused == "operator"


async def test_records_are_read_on_from_where_one_stopped(run: Run) -> None:
    await run.create(record_groups=True, max_queued_groups=9)
    await run.fill("a", "b", "c")
    first = await run.store.records(run.run_id, "", 2)
    rest = await run.store.records(run.run_id, first[-1].event_id, 10)
    assert [text(unpack(event.data)[1]) for event in (*first, *rest)] == ["a/0", "b/0", "c/0"]
    assert {event.kind for event in first} == {"accepted"}
    assert list(await run.store.records(run.run_id, rest[-1].event_id, 10)) == []


async def test_nothing_is_recorded_unless_the_policy_says_so(run: Run) -> None:
    await run.create()
    await run.fill("a", "b")
    await run.batch(0)
    assert list(await run.store.records(run.run_id, "", 10)) == []
    assert (await run.store.call(commands.update_policy(run.run_id, RunPolicy(batch_groups=2, record_groups=True)))) > 1
    await run.commit(0)
    assert [event.kind for event in await run.store.records(run.run_id, "", 10)] == ["trained"]


@pytest.mark.parametrize(("after", "limit"), [("last", 1), ("1-", 1), ("(1-0", 1), ("-", 1), ("", 0)])
async def test_records_refuse_what_is_no_event_id_or_limit(run: Run, after: str, limit: int) -> None:
    await run.create()
    with pytest.raises(InvalidField):
        await run.store.records(run.run_id, after, limit)
