"""Deleting a run leaves nothing of it, whoever finishes it."""

import asyncio
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest

from buffer_service import commands
from buffer_service.commands.replies import text
from buffer_service.commands.runs import delete_portion
from buffer_service.domain import ops
from buffer_service.domain.command import Command
from buffer_service.domain.policy import OverflowAction, RunPolicy
from buffer_service.store.keys import index_key
from buffer_wire.errors import NotReady, StoreUnavailable, UnknownRun
from tests.store.driver import Run, beside, weights

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


async def a_run_with_everything(run: Run) -> None:
    """Something of every kind that a run can have."""
    await run.create(
        batch_groups=3,
        micro_batch_groups=1,
        max_queued_groups=6,
        overflow_action=OverflowAction.BLOCK,
        record_groups=True,
        max_attempts=1,
    )
    await run.submit("leased", "continued", "failed", "pending", "delayed", environment="math")
    leases = {grant.task_id: grant for grant in (await run.lease(3)).grants}
    await run.give_back(leases["continued"], partial_rollout=b"half", head=weights(0), tokens=3)
    await run.give_back(leases["failed"], kind=ops.ReturnKind.FAILED)
    await run.store.call(
        commands.update_policy(
            run.run_id,
            RunPolicy(
                batch_groups=3,
                micro_batch_groups=1,
                max_queued_groups=6,
                overflow_action=OverflowAction.BLOCK,
                record_groups=True,
            ),
        )
    )
    (again,) = (await run.lease(1, worker="other")).grants
    await run.give_back(again, kind=ops.ReturnKind.FAILED, worker="other")
    await run.lease(1, worker="third")
    await run.fill("a", "b", environment="math")
    await run.fill("c", "d", "e", "f", environment="code")
    for micro_batch in range(3):
        await run.batch(0, micro_batch)
    await run.publish(1, commit_through=0)
    await run.batch(1)
    await run.fill("g", "h", "i", "j")
    (blocked,) = await run.push(run.group("k"))
    assert blocked.kind is ops.PushKind.BLOCKED
    report = ops.EngineReport("e", "w", "ready", weights(0), 0, 0, "", 0, decoded_tokens=5, reload_counters=[1] * 12)
    await run.store.call(commands.report_engine(run.run_id, report))


async def keys(run: Run) -> set[str]:
    """Keys on the store, of this run and of all."""
    return {text(key) for key in await run.command("KEYS", "*")}


async def test_nothing_is_left_of_a_deleted_run(run: Run) -> None:
    other = Run(run.store, "other")
    await other.create()
    await other.fill("a")
    before = await keys(run)
    await a_run_with_everything(run)
    names = {key.rpartition("}:")[2].partition(":")[0] for key in await keys(run) if f"{{{run.run_id}}}" in key}
    everything = {
        "run",
        "groups",
        "subqueues",
        "q",
        "a",
        "steps",
        "micro_batches",
        "chunks",
        "tasks",
        "specs",
        "leases",
        "held",
    }
    everything |= {"pending", "pending_environments", "delayed", "workers", "engines", "ended", "failures", "manifests"}
    everything |= {
        "engine_counters",
        "engine_reloads",
        "response_lengths",
        "snapshots",
        "commits",
        "record",
        "waiting",
        "staging",
        "environments",
        "env_ledger",
        "test_now",
    }
    assert names >= everything
    await run.store.delete_run(run.run_id)
    assert await keys(run) == before
    assert list(await run.store.list_runs()) == ["other"]
    assert await other.bodies(await other.batch(0, batch_groups=1)) == [b"body-a"]


async def test_nothing_is_left_of_stages_blobs_and_groups_given_back(run: Run) -> None:
    await run.create(stages=("reference", "values"), batch_groups=2, max_queued_groups=8)
    before = {run.names[1]}
    await run.submit("started", environment="math")
    await run.lease()
    await run.fill("a", "b", "c", "d")
    ask = ops.StageAsk("reference", "s", "i", "r", 8)
    for lease in (await run.store.call(commands.lease_groups(run.run_id, ask))).leases:
        name = lease.group_id.partition("/")[0]
        assert await run.push_kinds(run.group(name, b"columns", lease_id=lease.lease_id)) == ["added"]
    policy = RunPolicy(stages=("values",), batch_groups=2, max_queued_groups=8)
    await run.store.call(commands.lease_groups(run.run_id, ops.StageAsk("values", "s", "i", "q", 1)))
    await run.store.call(commands.update_policy(run.run_id, policy))
    for lease in (
        await run.store.call(commands.lease_groups(run.run_id, ops.StageAsk("values", "t", "i", "r", 3)))
    ).leases:
        name = lease.group_id.partition("/")[0]
        assert await run.push_kinds(run.group(name, b"values", lease_id=lease.lease_id)) == ["added"]
    await run.batch(0)
    await run.store.call(commands.reject(run.run_id, ops.Reject(run.term, 0, ["b/0"], "why")))
    digest = sha256(b"image").hexdigest()
    await run.store.call(commands.write_blob(run.run_id, digest, b"image"))
    names = {key.rpartition("}:")[2].partition(":")[0] for key in await keys(run) if f"{{{run.run_id}}}" in key}
    assert names >= {"stages", "stage_held", "stage_leases", "stage_workers", "env_work", "rejected", "blobs"}
    await run.store.delete_run(run.run_id)
    assert await keys(run) == before


async def test_a_deleted_run_is_unknown_and_its_name_is_free(run: Run) -> None:
    await a_run_with_everything(run)
    await run.store.delete_run(run.run_id)
    for attempt in (run.view(), run.lease(), run.push(run.group("a")), run.store.delete_run(run.run_id)):
        with pytest.raises(UnknownRun):
            await attempt
    view = await run.create()
    assert (view.revision, view.term, view.next_step) == (1, 1, 0)
    await run.fill("a", "b")
    assert (await run.batch(0)).total_groups == 2
    await run.check()


async def test_nobody_finds_a_run_from_the_first_moment_of_its_deletion(run: Run) -> None:
    await a_run_with_everything(run)
    await run.store.call(delete_portion(run.run_id, begin=True))
    assert list(await run.store.list_runs()) == []
    for attempt in (
        run.view(),
        run.push(run.group("x")),
        run.pull(0),
        run.resume(),
        run.store.records("a-run.1", "", 1),
    ):
        with pytest.raises(UnknownRun):
            await attempt
    with pytest.raises(NotReady, match="is being deleted"):
        await run.store.create_run(run.run_id, RunPolicy())
    await run.store.delete_run(run.run_id)
    assert await keys(run) == {run.names[1]}


async def large(run: Run) -> None:
    """A run whose deletion takes several portions: of what is queued, assembled and pending."""
    await run.create(batch_groups=700, max_queued_groups=1500)
    for part in range(2):
        await run.push(*(run.group(f"t{part}-{i}") for i in range(700)))
        await run.batch(part)
    await run.push(*(run.group(f"q{i}") for i in range(1500)))
    await run.submit(*[""] * 1200)


class Crash(Exception):
    """The process is gone."""


@pytest.mark.parametrize("lives", range(9))
async def test_the_sweep_finishes_a_deletion_whose_process_died(
    run: Run, monkeypatch: pytest.MonkeyPatch, lives: int
) -> None:
    await large(run)
    calls = 0
    real: Callable[..., Awaitable[object]] = run.store._calls.call

    async def dying(command: Command[Any]) -> object:
        nonlocal calls
        if calls > lives:
            raise Crash
        calls += 1
        return await real(command)

    with monkeypatch.context() as patched:
        patched.setattr(run.store._calls, "call", dying)
        try:
            await run.store.delete_run(run.run_id)
        except Crash:
            assert list(await run.store.list_runs()) == []
    await run.store.sweep()
    assert await keys(run) == {run.names[1]}


async def test_the_sweep_takes_a_name_off_the_list_that_a_dead_process_left_there(run: Run) -> None:
    await run.create()
    await run.store.delete_run(run.run_id)
    # It died between its last two steps.
    await run.command("SADD", run.names[0], run.run_id)
    assert list(await run.store.list_runs()) == []
    await run.store.sweep()
    assert await keys(run) == {run.names[1]}


async def test_several_replicas_delete_the_same_run_at_once(run: Run) -> None:
    await large(run)
    replicas = [await beside(run.store) for _ in range(2)]
    try:
        deletions = (store.delete_run(run.run_id) for store in (run.store, *replicas))
        results = await asyncio.gather(run.store.sweep(), *deletions, return_exceptions=True)
    finally:
        for store in replicas:
            await store.close()
    assert [result for result in results[1:] if not isinstance(result, UnknownRun | type(None))] == []
    assert None in results[1:]
    assert await keys(run) == {run.names[1]}


async def test_a_lost_store_stops_a_deletion_and_the_next_call_goes_on(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    await large(run)

    async def unavailable(run_id: str, portion: int = 500) -> int:
        del run_id, portion
        raise StoreUnavailable("here", "gone")

    with monkeypatch.context() as patched:
        patched.setattr(run.store._calls, "delete_trash", unavailable)
        with pytest.raises(StoreUnavailable):
            await run.store.delete_run(run.run_id)
    assert await run.command("EXISTS", index_key(run.run_id, "deleting")) == 1
    await run.store.delete_run(run.run_id)
    assert await keys(run) == {run.names[1]}
