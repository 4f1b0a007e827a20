"""Looks into a run, compared with what was put in; and what its pages promise while the run goes on."""

import shutil
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from buffer_service.domain import inspection as ins
from buffer_service.domain import ops
from buffer_service.store.inspect_ops import HEAD_BYTES
from buffer_service.store.keys import index_key
from buffer_service.store.redis_store import RedisRunStore
from buffer_service.store.replies import pack
from buffer_service.store.scripts import load_scripts
from buffer_wire.errors import InvalidField, ReplayGap, StepAhead, UnknownRun, UnknownTask
from tests.store.driver import Run
from tests.support.store_server import StoreServer, store_server

BINARIES = ["", pytest.param("redis-server", marks=pytest.mark.redis7)]
"""Of the default store, and of Redis."""


@pytest.fixture(scope="module", params=BINARIES)
def server(request: pytest.FixtureRequest) -> Iterator[StoreServer]:
    binary = shutil.which(request.param) if request.param else None
    if request.param and binary is None:
        pytest.skip(f"no {request.param} on PATH")
    with store_server(binary=Path(binary) if binary else None) as running:
        yield running


@pytest.fixture
async def store(server: StoreServer) -> AsyncIterator[RedisRunStore]:
    server.flush()
    connected = await RedisRunStore.connect(server.url, timeout_s=10)
    yield connected
    await connected.close()


async def tasks(
    run: Run,
    which: ins.TaskSet,
    after: ins.Position = (),
    limit: int = 100,
    environment: str | None = None,
    worker_id: str = "",
) -> ins.Page[ins.TaskFacts]:
    return await run.store.list_tasks(run.run_id, which, after, limit, environment=environment, worker_id=worker_id)


async def groups(
    run: Run,
    step: int | None = None,
    after: ins.Position = (),
    limit: int = 100,
    environment: str | None = None,
) -> ins.Page[ins.GroupView]:
    _, page = await run.store.list_groups(run.run_id, step, after, limit, environment=environment)
    return page


async def all_tasks(run: Run, which: ins.TaskSet, limit: int = 100, **filters: Any) -> list[ins.TaskFacts]:
    found: list[ins.TaskFacts] = []
    page = await tasks(run, which, (), limit, **filters)
    found += page.items
    while page.following:
        page = await tasks(run, which, page.following, limit, **filters)
        found += page.items
    return found


async def all_groups(run: Run, step: int | None = None, limit: int = 100, **filters: Any) -> list[ins.GroupView]:
    found: list[ins.GroupView] = []
    page = await groups(run, step, (), limit, **filters)
    found += page.items
    while page.following:
        page = await groups(run, step, page.following, limit, **filters)
        found += page.items
    return found


async def all_steps(run: Run, limit: int = 100) -> list[ins.StepView]:
    page = await run.store.list_steps(run.run_id, (), limit)
    found = list(page.items)
    while page.following:
        page = await run.store.list_steps(run.run_id, page.following, limit)
        found += page.items
    return found


def ids(items: Any) -> list[str]:
    return [getattr(item, "group_id", None) or item.task_id for item in items]


# ── tasks ────────────────────────────────────────────────────────────────────


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
    assert await run.store.task(run.run_id, "t1") == ((await run.view()).revision, run.now, found[0])


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
    await run.store.extend(run.run_id, "w1", "i", [first.lease_id])
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
        await run.store.extend(run.run_id, "w", "i", [grant.lease_id for grant in held.values()][:256])
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
        _, _, task = await run.store.task(run.run_id, name)
        return task.place

    assert [await place(name) for name in ("g1", "g2", "g3")] == ["ended", "queued", "queued"]
    await run.batch(0)
    assert [await place(name) for name in ("g2", "g3")] == ["in_step", "in_step"]
    with pytest.raises(UnknownTask, match="g4"):
        await run.store.task(run.run_id, "g4")
    with pytest.raises(UnknownRun):
        await run.store.task("nowhere", "g1")


# ── groups ───────────────────────────────────────────────────────────────────


async def test_queued_groups_come_in_order_of_acceptance_over_all_classes(run: Run) -> None:
    await run.create(max_queued_groups=100)
    await run.submit(*((f"p{i}", i % 3) for i in range(9)), environment="a")
    names = []
    for grant in (await run.lease(9)).grants:
        names.append(f"{grant.task_id}/0")
        assert await run.push_kinds(run.group(grant, environment="a")) == ["queued"]
    await run.fill("x", "y", environment="b")
    for limit in (1, 2, 5, 100):
        assert ids(await all_groups(run, None, limit)) == [*names, "x/0", "y/0"]
        assert ids(await all_groups(run, None, limit, environment="b")) == ["x/0", "y/0"]
    assert await run.queue() == [*names, "x/0", "y/0"]


async def test_a_groups_facts_are_those_that_were_pushed(run: Run) -> None:
    await run.create()
    await run.fill("g", head=0, tokens=40, samples=2, lengths=(5, 9), rewards=(0.25, 1.0), turns=3, truncated=1)
    (group,) = await all_groups(run)
    assert group == ins.GroupView(
        group_id="g/0", task_id="g", sequence=1, environment="env", priority=0, samples=2, tokens=40,
        response_tokens=14, longest_tokens=9, loss_tokens=20, size_bytes=len(b"body-g"), head=0, tail=0, mean_milli=0,
        reward_milli=1250, turns=3, truncated_samples=1, round=-1, rank=-1,
    )  # fmt: skip


async def test_queued_groups_that_stay_are_listed_once_although_others_come_and_go(run: Run) -> None:
    await run.create(max_queued_groups=1_000, batch_groups=2, order="lifo")
    names = [f"g{i:03d}" for i in range(50)]
    for i, name in enumerate(names):
        await run.fill(name, environment="ab"[i % 2])
    seen: list[str] = []
    page, step = await groups(run, None, (), 6), 0
    while True:
        seen += ids(page.items)
        if not page.following:
            break
        # The newest ones leave, and newer ones come.
        await run.batch(step)
        await run.fill(f"new{step}", environment="c")
        step += 1
        page = await groups(run, None, page.following, 6)
    still = await run.queue()
    stayed = [f"{name}/0" for name in names if f"{name}/0" in still]
    assert [name for name in seen if name in stayed] == stayed
    assert max(Counter(seen).values()) == 1
    assert step > 5


async def test_groups_of_a_step_come_by_round_and_rank(run: Run) -> None:
    await run.create(batch_groups=6, micro_batch_groups=1, max_queued_groups=6)
    await run.fill(*(f"g{i}" for i in range(4)))
    shards = await run.shards(0, 0, world_size=2)
    shards += await run.shards(0, 1, world_size=2)
    place, page = await run.store.list_groups(run.run_id, 0, (), 100, environment=None)
    assert place == "forming"
    assert ids(page.items) == [group for shard in shards for group in shard]
    assert [(group.round, group.rank) for group in page.items] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for limit in (1, 2, 3):
        assert ids(await all_groups(run, 0, limit)) == ids(page.items)
    with pytest.raises(StepAhead):
        await groups(run, 1)


async def test_a_step_of_more_ranks_than_groups_is_listed_whole(run: Run) -> None:
    await run.create(batch_groups=2)
    await run.fill("g1", "g2")
    await run.batch(0, world_size=7)
    for limit in (1, 2, 3, 100):
        assert sorted(ids(await all_groups(run, 0, limit))) == ["g1/0", "g2/0"]


async def test_a_large_step_is_listed_over_its_chunks_while_groups_of_it_are_lost(run: Run) -> None:
    await run.create(batch_groups=600, max_queued_groups=600)
    new = [run.group(f"g{i:03d}", environment="ab"[i % 2]) for i in range(600)]
    assert set(await run.push_kinds(*new)) == {"queued"}
    await run.batch(0)
    first = await groups(run, 0, (), 256)
    lost = ["g000/0", "g255/0", "g300/0"]
    await run.store.report_lost(run.run_id, 0, lost)
    seen = ids(first.items)
    page = first
    while page.following:
        page = await groups(run, 0, page.following, 100)
        seen += ids(page.items)
    assert [name for name in seen if name not in lost] == [
        f"g{i:03d}/0" for i in range(600) if f"g{i:03d}/0" not in lost
    ]
    of_b = await all_groups(run, 0, 50, environment="b")
    assert len(of_b) == 300 - 1
    assert {group.environment for group in of_b} == {"b"}


async def test_a_page_of_shards_that_are_no_more_is_refused(run: Run) -> None:
    await run.create(batch_groups=4, max_queued_groups=4)
    await run.fill("a", "b", "c", "d")
    await run.shards(0, world_size=2)
    page = await groups(run, 0, (), 2)
    await run.resume(0)
    with pytest.raises(InvalidField, match="page_token"):
        await groups(run, 0, page.following, 2)
    page = await groups(run, 0, (), 2)
    await run.shards(0, world_size=1)
    with pytest.raises(InvalidField, match="list it anew"):
        await groups(run, 0, page.following, 2)
    assert len(await all_groups(run, 0, 2)) == 4


# ── steps ────────────────────────────────────────────────────────────────────


async def test_steps_come_newest_first_as_they_were_assembled(run: Run) -> None:
    await run.create(batch_groups=2, max_queued_groups=20, retained_steps=2)
    for step in range(5):
        await run.fill(f"a{step}", f"b{step}", tokens=10 + step)
        await run.batch(step)
    await run.publish(1, 3)
    for limit in (1, 2, 100):
        steps = await all_steps(run, limit)
        assert [(step.step, step.place) for step in steps] == [(4, "delivered"), (3, "trained"), (2, "trained")]
    assert (await all_steps(run))[0] == ins.StepView(
        step=4, place=ins.Place.DELIVERED, train_version=0, target_groups=2, micro_batch_groups=0, rounds=1, ranks=1,
        groups=2, samples=8, tokens=28, loss_tokens=14, size_bytes=2 * len(b"body-a4"), staleness_sum=0,
        staleness_max=0,
    )  # fmt: skip
    with pytest.raises(ReplayGap):
        await groups(run, 1)


async def test_a_new_run_has_nothing_to_list(run: Run) -> None:
    await run.create()
    assert (await run.store.list_steps(run.run_id, (), 10)).items == []
    for which in ins.TaskSet:
        assert await all_tasks(run, which) == []
    assert await all_groups(run) == []
    waits = await run.store.waits(run.run_id, 10)
    assert (waits.blocked, waits.leased, waits.workers, waits.needed_groups) == (0, 0, 0, 0)


# ── waits ────────────────────────────────────────────────────────────────────


async def test_waits_name_the_line_the_leases_and_the_workers(run: Run) -> None:
    await run.create(overflow_action="block", max_queued_groups=2, lease_ttl_ms=60_000)
    await run.fill("q1", "q2")
    await run.submit("t1", "t2", "t3")
    first = await run.one_lease(worker="w1")
    await run.pass_ms(2_000)
    await run.one_lease(worker="w2", instance="i2")
    bodies = {"g1": b"1" * 10, "g2": b"2" * (HEAD_BYTES + 5)}
    blocked = {}
    for name, body in bodies.items():
        (pushed,) = await run.push(run.group(name, body))
        blocked[name] = (run.group(name, body).facts, pushed.payload_key)
        await run.pass_ms(100)
    await run.store.retry_push(run.run_id, list(blocked.values()))
    waits = await run.store.waits(run.run_id, 10)
    assert waits.blocked == 2
    assert waits.pushes == [
        ins.BlockedPush(10, 1_002_000, run.now, bodies["g1"]),
        ins.BlockedPush(HEAD_BYTES + 5, 1_002_100, run.now, bodies["g2"][:HEAD_BYTES]),
    ]
    assert (waits.leased, ids(waits.expiring)) == (2, ["t1", "t2"])
    assert waits.expiring[0].expires_ms == 1_060_000
    assert first.task_id == "t1"
    assert waits.asked == [ins.WorkerView("w2", "i2", 1_002_000, 1), ins.WorkerView("w1", "i", 1_000_000, 1)]
    assert waits.clock == ins.AdmissionClock(2, 0, 0, 0, 0, 0, 1, 0)
    one = await run.store.waits(run.run_id, 1)
    assert (one.blocked, len(one.pushes), one.leased, len(one.expiring), len(one.asked)) == (2, 1, 2, 1, 1)
    await run.store.abandon_push(run.run_id, [key for _, key in blocked.values()])
    await run.check()


async def test_a_place_in_the_line_that_an_older_service_gave_has_no_time(run: Run) -> None:
    await run.create(overflow_action="block", max_queued_groups=2)
    await run.fill("q1", "q2")
    (pushed,) = await run.push(run.group("g1"))
    await run.command("ZADD", index_key(run.run_id, "waiting"), 7, pushed.payload_key)
    (push,) = (await run.store.waits(run.run_id, 1)).pushes
    assert (push.since_ms, push.tried_ms) == (0, run.now)


async def test_waits_hold_what_admission_goes_by(run: Run) -> None:
    await run.create(batch_groups=4, micro_batch_groups=1, max_queued_groups=4, max_attempts=3)
    await run.fill("a", "b")
    await run.batch(0, 0)
    await run.submit("t1", "t2")
    await run.give_back(await run.one_lease(), kind=ops.ReturnKind.FAILED, error="no")
    waits = await run.store.waits(run.run_id, 10)
    assert waits.clock == ins.AdmissionClock(
        queued=1, forming=1, open_target=4, published_version=0, next_step=0, published_steps=0, due_tasks=1,
        backing_off_tasks=1,
    )  # fmt: skip
    assert waits.policy == (await run.view()).policy


# ── nothing is changed ───────────────────────────────────────────────────────


async def test_no_look_changes_anything(run: Run) -> None:
    await run.create(overflow_action="block", max_queued_groups=2, retry_backoff_ms=100)
    await run.fill("q1", "q2")
    await run.push(run.group("g1"))
    await run.submit("t1", "t2")
    await run.give_back(await run.one_lease(), kind=ops.ReturnKind.FAILED, error="no")
    await run.one_lease()
    await run.batch(0)
    # Everything is overdue: the lease, the back-off, the place in the line.
    await run.pass_ms(3_600_000)

    async def dump() -> dict[bytes, Any]:
        keys = sorted(await run.command("KEYS", index_key(run.run_id, "*")))
        return {bytes(key): await run.command("DUMP", key) for key in keys}

    before = await dump()
    for which in ins.TaskSet:
        await all_tasks(run, which)
    await all_groups(run)
    await all_groups(run, 0)
    await run.store.list_steps(run.run_id, (), 10)
    await run.store.task(run.run_id, "t1")
    waits = await run.store.waits(run.run_id, 10)
    assert waits.expiring[0].expires_ms < run.now
    assert await dump() == before


@pytest.mark.parametrize("name", [name for name in load_scripts() if name.startswith("inspect_")])
async def test_a_look_runs_where_writes_are_refused(name: str, run: Run) -> None:
    await run.create()
    script = load_scripts()[name]
    arguments = {
        "inspect_tasks": ("leased", 10, 0, "", "", ()),
        "inspect_task": ("t",),
        "inspect_groups": (-1, 10, 0, "", ()),
        "inspect_steps": (10, -1),
        "inspect_waits": (10,),
    }[name]
    sha = await run.command("SCRIPT", "LOAD", script.source)
    reply = await run.command("EVALSHA_RO", sha, 1, index_key(run.run_id, "run"), pack(*arguments))
    assert reply
