"""Submitting, leasing, extending, giving back, expiring."""

import pytest

from buffer_service import commands
from buffer_service.commands.replies import text
from buffer_service.domain import ops
from buffer_service.domain.policy import RunPolicy
from buffer_service.store.keys import index_key
from buffer_wire.errors import (
    CursorConflict,
    FailureBudgetExceeded,
    InvalidField,
    PendingFull,
    RunPaused,
    StaleTerm,
    StepAhead,
)
from tests.store.driver import Run, weights

FAILED = ops.ReturnKind.FAILED
LIVE, LOST, CANCELLED = ops.LeaseState.LIVE, ops.LeaseState.LOST, ops.LeaseState.CANCELLED


def ids(leased: ops.Leased) -> list[str]:
    return [grant.task_id for grant in leased.grants]


async def test_tasks_without_ids_take_them_from_the_sequence(run: Run) -> None:
    await run.create()
    submitted = await run.submit("", "mine", "")
    assert list(submitted.task_ids) == ["t00000001", "mine", "t00000003"]
    assert (submitted.revision, submitted.cursor, submitted.pending) == (2, 3, 3)


async def test_a_repeated_submit_gets_the_first_reply_and_adds_nothing(run: Run) -> None:
    await run.create()
    request = ops.Submit(1, "same", 0, 5, b"", [ops.NewTask("", 4, 0, "", b"x")])
    first = await run.store.call(commands.submit(run.run_id, request))
    await run.lease()
    again = await run.store.call(commands.submit(run.run_id, request))
    assert (again.task_ids, again.cursor, again.pending) == (first.task_ids, 5, 1)
    assert again.revision == 3
    assert await run.tasks() == {"submitted": 1, "leased": 1}


async def test_a_submit_without_tasks_keeps_the_feeder_s_state(run: Run) -> None:
    await run.create()
    await run.submit("a")
    submitted = await run.store.call(commands.submit(run.run_id, ops.Submit(1, "empty", 1, 1, b"heard", [])))
    assert (submitted.cursor, list(submitted.task_ids), submitted.pending) == (1, [], 1)
    assert (await run.resume()).feeder_state == b"heard"


async def test_submit_refuses_and_writes_nothing(run: Run) -> None:
    await run.create(max_pending_tasks=2)
    await run.submit("a")

    def request(*names: str, term: int = 1, expected: int = 1) -> ops.Submit:
        return ops.Submit(term, "other", expected, 9, b"", [ops.NewTask(n, 1, 0, "", b"") for n in names])

    with pytest.raises(StaleTerm):
        await run.store.call(commands.submit(run.run_id, request("b", term=2)))
    with pytest.raises(CursorConflict):
        await run.store.call(commands.submit(run.run_id, request("b", expected=0)))
    with pytest.raises(PendingFull) as full:
        await run.store.call(commands.submit(run.run_id, request("b", "c")))
    assert full.value.attributes == {"pending": "1", "limit": "2"}
    with pytest.raises(InvalidField) as exists:
        await run.store.call(commands.submit(run.run_id, request("a")))
    assert exists.value.attributes["field"] == "tasks[0].task_id"
    await run.store.call(commands.update_policy(run.run_id, RunPolicy(batch_groups=2)))
    with pytest.raises(InvalidField) as twice:
        await run.store.call(commands.submit(run.run_id, request("b", "b")))
    assert twice.value.attributes["field"] == "tasks[1].task_id"
    view = await run.view()
    assert (view.cursor, view.tasks["submitted"]) == (1, 1)


async def test_leases_go_by_priority_then_what_came_back_then_sequence(run: Run) -> None:
    await run.create()
    await run.submit("a", ("b", 1), "c", ("d", 255), "e")
    back = (await run.lease(4)).grants
    assert [grant.task_id for grant in back] == ["d", "b", "a", "c"]
    await run.give_back(back[3], back[0], back[2])
    assert ids(await run.lease(9)) == ["d", "a", "c", "e"]


async def test_a_lease_carries_the_spec_and_its_identity(run: Run) -> None:
    await run.create()
    await run.submit("a")
    leased = await run.lease(2)
    assert list(leased.grants) == [ops.LeaseGrant("a/0/1", "a", 0, 1, b"spec-a", b"")]
    assert (leased.wait, leased.ttl_ms, leased.published) == (ops.LeaseWait.NO_TASKS, 60_000, weights(0))


async def test_a_repeated_lease_request_gets_the_same_leases_while_they_live(run: Run) -> None:
    await run.create()
    await run.submit("a", "b", "c")
    first = await run.lease(2, request_id="same")
    again = await run.lease(2, request_id="same")
    assert again.grants == first.grants
    assert (again.wait, again.revision) == (None, first.revision)
    await run.push(run.group(first.grants[0]))
    assert ids(await run.lease(2, request_id="same")) == ["b"]


async def test_a_request_that_was_given_nothing_is_not_remembered(run: Run) -> None:
    await run.create()
    assert (await run.lease(request_id="same")).wait is ops.LeaseWait.NO_TASKS
    await run.submit("a")
    assert ids(await run.lease(request_id="same")) == ["a"]


async def test_a_new_instance_of_a_worker_releases_what_the_old_one_held(run: Run) -> None:
    await run.create()
    await run.submit("a", "b")
    await run.lease(1, instance="old")
    other = await run.one_lease(worker="other")
    assert ids(await run.lease(1, instance="new")) == ["a"]
    assert (await run.store.call(commands.extend(run.run_id, "w", "old", ["a/0/1"]))).states == [LOST]
    assert (await run.store.call(commands.extend(run.run_id, "other", "i", [other.lease_id]))).states == [LIVE]
    assert (await run.view()).statistics["leases_returned"] == 1


async def test_admission_counts_what_exists(run: Run) -> None:
    await run.create(max_inflight_groups=2)
    await run.submit(*"abcdef")
    leased = await run.lease(5)
    assert (len(leased.grants), leased.wait) == (2, ops.LeaseWait.AT_CAPACITY)
    assert (await run.lease(1)).wait is ops.LeaseWait.AT_CAPACITY
    await run.push(run.group(leased.grants[0]))
    assert len((await run.lease(5)).grants) == 1


async def test_reserved_queue_space_counts_queued_and_leased(run: Run) -> None:
    await run.create(reserve_queue_space=True, max_queued_groups=3)
    await run.submit(*"abcdef")
    leased = await run.lease(2)
    await run.push(run.group(leased.grants[0]))
    assert len((await run.lease(5)).grants) == 1


async def test_lookahead_bounds_all_groups_that_exist(run: Run) -> None:
    await run.create(max_lookahead=0, max_queued_groups=9)
    await run.submit(*"abcdefgh")
    leased = await run.lease(9)
    assert (len(leased.grants), leased.wait) == (2, ops.LeaseWait.AT_CAPACITY)
    await run.push(*map(run.group, leased.grants))
    await run.batch(0)
    assert (await run.lease(9)).wait is ops.LeaseWait.AT_CAPACITY
    await run.publish(1, commit_through=0)
    assert len((await run.lease(9)).grants) == 2


async def test_an_engine_that_is_too_old_for_any_batch_gets_no_work(run: Run) -> None:
    await run.create(max_staleness=1)
    await run.submit("a")
    await run.publish(3)
    stale = await run.lease(loaded=weights(1))
    assert (stale.grants, stale.wait, stale.required_version) == ([], ops.LeaseWait.ENGINE_STALE, 2)
    assert len((await run.lease(loaded=weights(2))).grants) == 1


async def test_a_quarantined_engine_gets_no_work(run: Run) -> None:
    await run.create()
    await run.submit("a")
    await run.store.call(
        commands.report_engine(run.run_id, ops.EngineReport("e", "w", "quarantined", weights(0), 0, 0, "", 1))
    )
    assert (await run.lease()).wait is ops.LeaseWait.QUARANTINED
    assert ids(await run.lease(engine="other")) == ["a"]


async def test_extending_prolongs_live_leases_only(run: Run) -> None:
    await run.create(lease_ttl_ms=1000)
    await run.submit("a", "b")
    a, b = (await run.lease(2)).grants
    await run.push(run.group(b))
    await run.pass_ms(1000)
    extended = await run.store.call(
        commands.extend(run.run_id, "w", "i", ["b/0/1", a.lease_id, "a/0/2", "a/1/1", "x/0/1", "nonsense"])
    )
    assert extended.states == [LOST, LIVE, LOST, LOST, LOST, LOST]
    await run.pass_ms(1000)
    await run.store.sweep()
    assert (await run.tasks())["leased"] == 1
    await run.pass_ms(1)
    assert (await run.store.call(commands.extend(run.run_id, "w", "i", [a.lease_id]))).states == [LOST]
    await run.store.sweep()
    assert (await run.view()).statistics["leases_expired"] == 1


async def test_an_expired_lease_is_a_failure_with_back_off(run: Run) -> None:
    await run.create(lease_ttl_ms=1000, retry_backoff_ms=100)
    await run.submit("a")
    lease = await run.one_lease()
    await run.pass_ms(1001)
    assert (await run.lease()).wait is ops.LeaseWait.BACKING_OFF
    assert await run.give_back(lease) == ["lost"]
    await run.pass_ms(100)
    again = await run.one_lease()
    assert again.lease_id == "a/0/2"
    assert await run.give_back(again, kind=FAILED, error="x") == ["pending"]
    await run.pass_ms(199)
    assert (await run.lease()).wait is ops.LeaseWait.BACKING_OFF
    await run.pass_ms(1)
    assert (await run.one_lease()).attempt == 3


async def test_back_off_stops_doubling_at_64_times(run: Run) -> None:
    await run.create(max_attempts=100, retry_backoff_ms=10)
    await run.submit("a")
    for failures in range(1, 10):
        await run.give_back(await run.one_lease(), kind=FAILED)
        await run.pass_ms(10 * 2 ** min(failures - 1, 6) - 1)
        assert (await run.lease()).wait is ops.LeaseWait.BACKING_OFF
        await run.pass_ms(1)


async def test_interrupted_tasks_come_back_at_once_with_their_partial_rollout(run: Run) -> None:
    await run.create()
    await run.submit("a")
    lease = await run.one_lease()
    assert await run.give_back(lease, partial_rollout=b"half", head=weights(0), tokens=5) == ["pending"]
    second = await run.one_lease()
    assert (second.lease_id, second.partial_rollout) == ("a/0/2", b"half")
    assert await run.give_back(second) == ["pending"]
    third = await run.one_lease()
    assert third.partial_rollout == b"half"
    assert await run.give_back(third, partial_rollout=b"three quarters", head=weights(0), tokens=7) == ["pending"]
    assert (await run.one_lease()).partial_rollout == b"three quarters"
    await run.check()
    assert len(await run.payload_keys()) == 1


async def test_a_lost_lease_can_neither_extend_nor_return(run: Run) -> None:
    await run.create()
    await run.submit("a")
    lease = await run.one_lease()
    assert await run.give_back(lease, instance="another", partial_rollout=b"x") == ["lost"]
    assert await run.give_back(lease, worker="another") == ["lost"]
    assert await run.give_back(lease) == ["pending"]
    assert await run.give_back(lease, partial_rollout=b"x") == ["lost"]
    assert (await run.view()).statistics["leases_returned"] == 1
    await run.check()
    assert await run.payload_keys() == set()


async def test_a_task_fails_for_good_after_its_attempts(run: Run) -> None:
    await run.create(max_attempts=2, retry_backoff_ms=0)
    await run.submit("a")
    await run.give_back(await run.one_lease(), kind=FAILED, error="first", partial_rollout=b"c", head=weights(0))
    assert await run.give_back(await run.one_lease(), kind=FAILED, error="second") == ["failed"]
    view = await run.view()
    assert list(view.failures) == [ops.TaskFailure("a", 2, "second", run.now)]
    assert await run.tasks() == {"submitted": 1, "failed": 1}
    assert (await run.lease()).wait is ops.LeaseWait.NO_TASKS
    await run.check()
    assert await run.payload_keys() == set()


async def test_the_failure_budget_stops_the_run_until_it_is_raised(run: Run) -> None:
    await run.create(max_attempts=1, failure_budget=1)
    await run.submit("a", "b", "c", "d")
    a, b, c = (await run.lease(3)).grants
    await run.give_back(a, b, kind=FAILED, error="broken reward")
    assert (await run.view()).paused == "failure_budget_exceeded"
    with pytest.raises(FailureBudgetExceeded) as over:
        await run.pull(0)
    assert over.value.attributes == {"failed": "2", "budget": "1", "last_error": "broken reward"}
    with pytest.raises(RunPaused):
        await run.submit("e")
    assert (await run.lease()).wait is ops.LeaseWait.PAUSED
    assert await run.push_kinds(run.group(c)) == ["queued"]
    await run.resume()
    assert (await run.view()).paused == "failure_budget_exceeded"
    await run.store.call(
        commands.update_policy(run.run_id, RunPolicy(batch_groups=2, max_attempts=1, failure_budget=2))
    )
    assert (await run.view()).paused == ""
    assert ids(await run.lease()) == ["d"]


async def test_a_thousand_leases_expire_in_portions(run: Run) -> None:
    await run.create(lease_ttl_ms=1000)
    for _ in range(3):
        await run.submit(*[""] * 800)
    while (await run.lease(256)).grants:
        pass
    await run.pass_ms(1001)
    assert await run.store.sweep() == 2400
    assert await run.tasks() == {"submitted": 2400, "pending": 2400}


async def test_a_refused_operation_remembers_the_time(run: Run) -> None:
    await run.create(lease_ttl_ms=1000)
    await run.submit("a")
    lease = await run.one_lease()
    await run.pass_ms(1001)
    with pytest.raises(StepAhead):
        await run.pull(1)
    await run.at(run.now - 1001)
    assert (await run.store.call(commands.extend(run.run_id, "w", "i", [lease.lease_id]))).states == [LOST]


async def test_time_never_goes_back(run: Run) -> None:
    await run.create(lease_ttl_ms=1000)
    await run.submit("a")
    lease = await run.one_lease()
    await run.pass_ms(500)
    await run.store.call(commands.extend(run.run_id, "w", "i", [lease.lease_id]))
    await run.at(run.now - 400_000)
    await run.store.call(commands.extend(run.run_id, "w", "i", [lease.lease_id]))
    assert await run.command("ZSCORE", index_key(run.run_id, "leases"), "000000000000001a") == b"1001500"


async def test_a_new_process_of_a_worker_that_held_much_returns_it_in_portions(run: Run) -> None:
    await run.create(max_pending_tasks=600)
    await run.submit(*(f"t{index}" for index in range(600)))
    for _ in range(3):
        await run.lease(200)
    await run.command("CONFIG", "RESETSTAT")
    (grant,) = (await run.lease(1, instance="after")).grants
    stats = text(await run.command("INFO", "commandstats"))
    assert grant.lease_id == "t0/0/2"
    # 600 leases by at most 256 a call.
    assert "cmdstat_evalsha:calls=3," in stats
    assert await run.tasks() == {"submitted": 600, "pending": 599, "leased": 1}
    assert (await run.view()).statistics["leases_returned"] == 600
    await run.check()


async def test_a_call_ends_so_many_back_offs_as_it_leases_at_least(run: Run) -> None:
    await run.create(max_pending_tasks=600, retry_backoff_ms=100)
    await run.submit(*(f"t{index}" for index in range(600)))
    for _ in range(3):
        await run.give_back(*(await run.lease(200)).grants, kind=ops.ReturnKind.FAILED)
    await run.pass_ms(100)
    leased = await run.lease(400)
    assert [grant.task_id for grant in leased.grants] == [f"t{index}" for index in range(400)]
    assert leased.wait is None
    leased = await run.lease(400)
    assert [grant.task_id for grant in leased.grants] == [f"t{index}" for index in range(400, 600)]
    assert leased.wait is ops.LeaseWait.NO_TASKS
    await run.check()
