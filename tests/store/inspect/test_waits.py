"""Tests of who waits on whom; and that no look changes anything."""

from typing import Any

import pytest

from buffer_service import commands
from buffer_service.commands.replies import pack
from buffer_service.domain import inspection as ins
from buffer_service.domain import ops
from buffer_service.store.keys import index_key
from buffer_service.store.redis_store import HEAD_BYTES
from buffer_service.store.scripts import load_scripts
from tests.store.driver import Run
from tests.store.inspect.listing import all_groups, all_tasks, ids


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
    assert waits.clock == ins.AdmissionClock(2, 0, 0, 0, 0, 0, 1, 0, startable_tasks=1)
    one = await run.store.waits(run.run_id, 1)
    assert (one.blocked, len(one.pushes), one.leased, len(one.expiring), len(one.asked)) == (2, 1, 2, 1, 1)
    await run.store.call(commands.abandon_push(run.run_id, [key for _, key in blocked.values()]))
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
        backing_off_tasks=1, startable_tasks=1,
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
    await run.store.call(commands.list_steps(run.run_id, (), 10))
    await run.store.call(commands.task(run.run_id, "t1"))
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
