"""Lists of tasks, compared with what was put in; and what their pages promise while the run goes on."""

from collections import Counter

import pytest

from buffer_service import commands
from buffer_service.domain import inspection as ins
from buffer_service.domain import ops
from buffer_wire.errors import UnknownRun, UnknownTask
from tests.store.driver import Run
from tests.store.inspect.listing import all_tasks, ids, tasks


async def test_pending_tasks_come_in_the_order_of_leasing_within_each_environment(run: Run) -> None:
    await run.create()
    await run.submit("a1", ("a2", 3), "a3", environment="a")
    await run.submit("b1", ("b2", 1), environment="b")
    for limit in (1, 2, 3, 100):
        assert ids(await all_tasks(run, ins.TaskSet.PENDING, limit)) == ["a2", "a1", "a3", "b2", "b1"]
        assert ids(await all_tasks(run, ins.TaskSet.PENDING, limit, environment="b")) == ["b2", "b1"]
    assert ids(await all_tasks(run, ins.TaskSet.PENDING, environment="none")) == []
    leased = [(await run.one_lease(request_id=f"r{i}")).task_id for i in range(5)]
    assert sorted(leased) == ["a1", "a2", "a3", "b1", "b2"]
    await run.check()


async def test_tasks_that_back_off_come_first_with_the_time_when_they_are_due(run: Run) -> None:
    await run.create(retry_backoff_ms=500)
    await run.submit("t1", "t2", "t3")
    grant = await run.one_lease()
    await run.give_back(grant, kind=ops.ReturnKind.FAILED, error="engine fell over")
    found = await all_tasks(run, ins.TaskSet.PENDING, 1)
    assert ids(found) == ["t1", "t2", "t3"]
    assert (found[0].not_before_ms, found[0].failures, found[0].error) == (run.now + 500, 1, "engine fell over")
    assert [task.not_before_ms for task in found[1:]] == [-1, -1]
    assert await run.store.call(commands.task(run.run_id, "t1")) == ((await run.view()).revision, run.now, found[0])


async def test_pending_tasks_that_stay_are_listed_although_others_come_and_go(run: Run) -> None:
    await run.create()
    names = [f"t{i:03d}" for i in range(60)]
    await run.submit(*names)
    seen: list[str] = []
    leased: list[str] = []
    page = await tasks(run, ins.TaskSet.PENDING, (), 7)
    while True:
        seen += ids(page.items)
        if not page.following:
            break
        # The last one listed goes, so that its place has to be found without it; and one of higher priority comes.
        (grant,) = (await run.lease(1)).grants
        leased.append(grant.task_id)
        await run.submit((f"new{len(seen)}", 9))
        page = await tasks(run, ins.TaskSet.PENDING, page.following, 7)
    stayed = [name for name in names if name not in leased]
    assert [name for name in seen if name in stayed] == stayed
    assert max(Counter(seen).values()) == 1


async def test_leases_are_listed_with_worker_expiry_and_heartbeat(run: Run) -> None:
    await run.create(lease_ttl_ms=60_000)
    await run.submit("t1", "t2", "t3")
    first = await run.one_lease(worker="w1")
    await run.pass_ms(5_000)
    second = await run.one_lease(worker="w2", instance="i2")
    await run.pass_ms(1_000)
    await run.store.call(commands.extend(run.run_id, "w1", "i", [first.lease_id]))
    found = {task.task_id: task for task in await all_tasks(run, ins.TaskSet.LEASED)}
    assert set(found) == {"t1", "t2"}
    assert (found["t1"].worker_id, found["t1"].expires_ms, found["t1"].leased_ms) == ("w1", run.now + 60_000, 1_000_000)
    assert (found["t2"].worker_id, found["t2"].instance_id) == ("w2", "i2")
    assert (found["t2"].expires_ms, found["t2"].lease_ttl_ms) == (1_065_000, 60_000)
    assert ids(await all_tasks(run, ins.TaskSet.LEASED, worker_id="w2")) == [second.task_id]
    assert ids(await all_tasks(run, ins.TaskSet.LEASED, worker_id="nobody")) == []
    assert ids(await all_tasks(run, ins.TaskSet.LEASED, environment="other")) == []


async def test_leases_that_stay_are_listed_although_heartbeats_and_others_go_on(run: Run) -> None:
    await run.create(max_pending_tasks=1_000)
    await run.submit(*(f"t{i:03d}" for i in range(600)))
    held: dict[str, ops.LeaseGrant] = {}
    for number in range(3):
        held |= {grant.task_id: grant for grant in (await run.lease(200, request_id=f"r{number}")).grants}
    stayed = set(list(held)[100:])
    seen: Counter[str] = Counter()
    page, pages = await tasks(run, ins.TaskSet.LEASED, (), 50), 1
    while True:
        seen.update(ids(page.items))
        assert len(page.items) < 150, "a page is about as long as was asked for"
        if not page.following:
            break
        await run.pass_ms(10)
        leaving = [held.pop(name) for name in list(held)[:5] if name not in stayed]
        await run.give_back(*leaving)
        await run.store.call(commands.extend(run.run_id, "w", "i", [grant.lease_id for grant in held.values()][:256]))
        page, pages = await tasks(run, ins.TaskSet.LEASED, page.following, 50), pages + 1
    assert pages > 5
    assert stayed <= set(seen)
    of_worker = Counter(ids(await all_tasks(run, ins.TaskSet.LEASED, 50, worker_id="w")))
    assert set(of_worker) == set(held)


async def test_ended_tasks_come_newest_first_with_why(run: Run) -> None:
    await run.create(max_attempts=1, filter_equal_rewards=True)
    await run.submit("t1", "t2", "t3")
    await run.give_back(await run.one_lease(), kind=ops.ReturnKind.FAILED, error="no")
    assert await run.push_kinds(run.group(await run.one_lease(), rewards=(1.0, 1.0))) == ["filtered"]
    for limit in (1, 2, 100):
        newest, oldest = await all_tasks(run, ins.TaskSet.ENDED, limit)
        assert (newest.task_id, newest.state, newest.filtered, newest.place) == ("t2", "completed", True, "ended")
        assert (oldest.task_id, oldest.state, oldest.error, oldest.place) == ("t1", "failed", "no", "")
    assert ids(await all_tasks(run, ins.TaskSet.ENDED, environment="none")) == []


async def test_a_task_says_where_its_group_is(run: Run) -> None:
    await run.create(overflow_action="drop_oldest", max_queued_groups=2)
    await run.fill("g1", "g2", "g3")

    async def place(name: str) -> str:
        _, _, task = await run.store.call(commands.task(run.run_id, name))
        return task.place

    assert [await place(name) for name in ("g1", "g2", "g3")] == ["ended", "queued", "queued"]
    await run.batch(0)
    assert [await place(name) for name in ("g2", "g3")] == ["in_step", "in_step"]
    with pytest.raises(UnknownTask, match="g4"):
        await run.store.call(commands.task(run.run_id, "g4"))
    with pytest.raises(UnknownRun):
        await run.store.call(commands.task("nowhere", "g1"))
