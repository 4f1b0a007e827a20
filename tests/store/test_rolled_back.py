"""A store that is behind what it has acknowledged."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis.asyncio

from buffer_service import commands
from buffer_service.domain import ops
from buffer_service.domain.policy import OverflowAction, RunPolicy
from buffer_service.store.keys import index_key
from buffer_service.store.redis_store import RedisRunStore
from buffer_wire.errors import RunPaused, StoreRolledBack, UnprovenRevision
from buffer_wire.resp.errors import ConnectionLost
from buffer_wire.revision import Revision
from tests.store.driver import SECRET, Run, beside, claim
from tests.support.sentinels import free_port
from tests.support.store_server import StoreServer, store_server


async def test_a_caller_who_has_seen_more_pauses_the_run(run: Run) -> None:
    await run.create()
    await run.submit("a", "b")
    a, b = (await run.lease(2)).grants
    revision = (await run.view()).revision
    with pytest.raises(StoreRolledBack) as behind:
        await run.push(run.group(a), seen=revision + 5)
    assert behind.value.attributes == {
        "run_id": run.run_id,
        "seen_revision": str(revision + 5),
        "revision": str(revision),
    }
    view = await run.view()
    assert (view.paused, view.revision) == ("store_rolled_back", revision)
    await run.check()
    assert await run.payload_keys() == set()
    # Leases go on and may come back; nothing new is accepted.
    assert (await run.store.call(commands.extend(run.run_id, "w", "i", [a.lease_id]))).states == [ops.LeaseState.LIVE]
    assert await run.give_back(b) == ["pending"]
    assert (await run.lease()).wait is ops.LeaseWait.PAUSED


async def test_the_ids_of_lost_tasks_are_not_given_again(run: Run) -> None:
    """Workers may still be at work on them."""
    await run.create()
    assert (await run.submit("", "")).task_ids == ["t00000001", "t00000002"]
    with pytest.raises(StoreRolledBack):
        await run.pull(0, seen=(await run.view()).revision + 1)
    await run.resume()
    assert (await run.submit("")).task_ids == ["t100000003"]


Operation = Callable[[Run], Awaitable[object]]


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(lambda run: run.submit("x"), id="submit"),
        pytest.param(lambda run: run.push(run.group("x")), id="push"),
        pytest.param(lambda run: run.pull(1), id="pull"),
        pytest.param(lambda run: run.commit(0), id="commit"),
        pytest.param(lambda run: run.publish(1), id="publish"),
        pytest.param(lambda run: run.checkpoint(0), id="checkpoint"),
    ],
)
async def test_nothing_is_decided_until_a_resume(run: Run, operation: Operation) -> None:
    await run.create()
    await run.fill("a", "b")
    await run.batch(0)
    with pytest.raises(StoreRolledBack):
        await run.lease(seen=1000)
    with pytest.raises(RunPaused) as paused:
        await operation(run)
    assert paused.value.reason == "run_paused"
    assert (await run.batch(0)).replayed
    resumed = await run.resume()
    assert resumed.revision == 1001
    assert (await run.view()).paused == ""
    await run.commit(0, seen=1001)


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(lambda run: run.submit("x", seen=99), id="submit"),
        pytest.param(lambda run: run.lease(seen=99), id="lease"),
        pytest.param(
            lambda run: run.store.call(commands.extend(run.run_id, "w", "i", [], seen_revision=claim(99))), id="extend"
        ),
        pytest.param(
            lambda run: run.store.call(commands.give_back(run.run_id, "w", "i", [], seen_revision=claim(99))),
            id="give_back",
        ),
        pytest.param(lambda run: run.push(run.group("x"), seen=99), id="push"),
        pytest.param(lambda run: run.pull(0, seen=99), id="pull"),
        pytest.param(lambda run: run.commit(0, seen=99), id="commit"),
        pytest.param(lambda run: run.publish(1, seen=99), id="publish"),
        pytest.param(lambda run: run.checkpoint(0, seen=99), id="checkpoint"),
        pytest.param(
            lambda run: run.store.call(commands.update_policy(run.run_id, RunPolicy(), seen_revision=claim(99))),
            id="update_policy",
        ),
    ],
)
async def test_every_operation_notices(run: Run, operation: Operation) -> None:
    await run.create()
    with pytest.raises(StoreRolledBack):
        await operation(run)
    assert (await run.view()).paused == "store_rolled_back"


@pytest.mark.parametrize(
    "proof",
    [pytest.param("", id="none"), pytest.param("0" * 16, id="made up"), pytest.param(claim(98).proof, id="of another")],
)
async def test_a_revision_that_was_not_given_out_changes_nothing(run: Run, proof: str) -> None:
    """It refuses the one call: that of a caller who remembers another run of the name, or makes numbers up."""
    await run.create()
    await run.submit("a")
    (a,) = (await run.lease()).grants
    before = await run.view()
    for seen in (99, 2**53 - 1):
        with pytest.raises(UnprovenRevision) as refused:
            await run.store.push(run.run_id, [run.group(a)], seen_revision=Revision(seen, proof))
        assert refused.value.attributes["revision"] == str(before.revision)
    assert await run.view() == before
    await run.check()
    assert await run.payload_keys() == set()
    assert [pushed.kind for pushed in await run.push(run.group(a))] == [ops.PushKind.QUEUED]
    resumed = await run.resume()
    assert resumed.revision < 99


async def test_every_reply_that_acknowledges_proves_its_revision(run: Run) -> None:
    await run.create()
    submitted = await run.submit("a")
    leased = await run.lease()
    watched = await run.store.call(commands.weights(run.run_id))
    listed, _ = await run.store.call(commands.evaluations(run.run_id))
    for revision in (
        submitted.revision,
        leased.revision,
        watched.revision,
        listed,
        await run.store.call(commands.pause_run(run.run_id)),
    ):
        assert revision.proof == claim(revision).proof
    assert SECRET.encode() not in repr(await run.view()).encode()


async def test_a_run_of_an_older_service_gets_a_secret(run: Run, server: StoreServer) -> None:
    """Its own past stays unproven; what it gives out from then on is believed."""
    await run.create()
    await run.command("HDEL", index_key(run.run_id, "run"), "secret")
    younger = await beside(run.store)
    revision = await younger.call(commands.pause_run(run.run_id))
    assert len(revision.proof) == 16
    with pytest.raises(UnprovenRevision):
        await run.lease(seen=99)
    assert (await run.store.call(commands.pause_run(run.run_id))).proof == revision.proof
    await younger.close()


async def test_a_refused_retry_gives_up_what_was_blocked_but_not_what_was_queued(run: Run) -> None:
    await run.create(overflow_action=OverflowAction.BLOCK, max_queued_groups=3)
    await run.fill("x", "y")
    kept, waiting = run.group("kept"), run.group("waiting")
    (first,) = await run.push(kept)
    (blocked,) = await run.push(waiting)
    keys = {await _key(run, "kept/0"): kept, blocked.payload_key: waiting}
    assert first.kind is ops.PushKind.QUEUED
    with pytest.raises(StoreRolledBack):
        await run.lease(seen=99)
    with pytest.raises(RunPaused):
        await run.store.retry_push(run.run_id, [(g.facts, key) for key, g in keys.items()])
    await run.check()
    assert len(await run.payload_keys()) == 3


async def _key(run: Run, group_id: str) -> str:
    key: bytes = (await run.queued_record(group_id))[3]
    return key.decode()


async def restarted(server: StoreServer, *runs: Run) -> None:
    """Kill the store and start it again."""
    server.kill()
    server.start()
    await noticed(*runs)


async def noticed(*runs: Run) -> None:
    """Every process has noticed that its connections are gone."""
    for run in runs:
        for link in ("_control", "_writes"):
            connection = getattr(run.store._connection, link)._connection
            if connection is not None:
                with contextlib.suppress(ConnectionLost):
                    await connection.request([("PING",)])


@pytest.mark.faults
async def test_whoever_looks_at_a_run_whose_tail_is_lost_sees_it_paused() -> None:
    """A scrape looks at all runs, and must not fail over one."""
    with store_server() as server:
        store = await RedisRunStore.connect(server.url, timeout_s=10)
        run = Run(store)
        await run.create()
        server.save()
        await run.fill("lost")
        await restarted(server, run)
        await store.call(commands.evaluations(run.run_id, acknowledges=False))
        assert (await run.view()).paused == "store_rolled_back"
        await store.close()


@pytest.mark.faults
async def test_a_lost_tail_is_noticed_however_far_others_have_moved_the_run_on() -> None:
    """One process has acknowledged what the store lost; another one, that has not, is the first to come back."""
    with store_server() as server:
        ahead, behind = [await RedisRunStore.connect(server.url, timeout_s=10) for _ in range(2)]
        run, other = Run(ahead), Run(behind)
        await run.create()
        await run.fill("a")
        await other.fill("b")
        server.save()
        await run.fill("lost-1", "lost-2")
        acknowledged = (await run.view()).revision
        await restarted(server, run, other)
        await other.fill("c", "d", "e")
        survived = acknowledged - 2
        assert (await other.view()).revision > acknowledged
        with pytest.raises(StoreRolledBack) as behind_it:
            await run.fill("f")
        assert behind_it.value.attributes["seen_revision"] == str(acknowledged)
        assert behind_it.value.attributes["revision"] == str(survived)
        with pytest.raises(RunPaused):
            await other.fill("g")
        await run.resume()
        other.term = run.term
        await run.fill("f")
        await other.fill("g")
        assert (await run.ledger())["accepted"] == 7
        await run.check()
        for store in (ahead, behind):
            await store.close()


@pytest.mark.faults
async def test_a_store_that_lost_nothing_is_not_suspected() -> None:
    with store_server("--appendonly", "yes", "--appendfsync", "no") as server:
        stores = [await RedisRunStore.connect(server.url, timeout_s=10) for _ in range(2)]
        runs = [Run(store) for store in stores]
        await runs[0].create()
        for micro_batch in range(3):
            for number, run in enumerate(runs):
                await run.fill(f"{micro_batch}-{number}")
            await restarted(server, *runs)
            await runs[micro_batch % 2].store.sweep()
        for run in runs:
            assert (await run.view()).paused == ""
            await run.fill(f"last-{id(run)}")
        await runs[0].check()
        for store in stores:
            await store.close()


@pytest.mark.faults
async def test_what_a_resume_has_settled_is_not_held_against_the_run_again() -> None:
    with store_server() as server:
        stores = [await RedisRunStore.connect(server.url, timeout_s=10) for _ in range(2)]
        run, other = (Run(store) for store in stores)
        await run.create()
        server.save()
        await run.fill("lost-1")
        await other.fill("lost-2")
        await restarted(server, run, other)
        # The trainer resumes through the process that knows of the loss; it need not be told twice.
        await run.resume()
        other.term = run.term
        await other.fill("a")
        await run.fill("b")
        view = await run.view()
        assert (view.paused, view.groups["queued"].groups) == ("", 2)
        await run.check()
        for store in stores:
            await store.close()


@pytest.mark.faults
async def test_the_sweep_of_a_process_that_knows_more_pauses_the_run() -> None:
    with store_server() as server:
        store = await RedisRunStore.connect(server.url, timeout_s=10)
        run = Run(store)
        await run.create()
        server.save()
        await run.fill("lost")
        await restarted(server, run)
        await store.sweep()
        assert (await run.view()).paused == "store_rolled_back"
        await store.close()


async def _becomes(server: StoreServer, upstream: StoreServer | None, port: int) -> None:
    """The server becomes a replica of another one and has its data, or a primary."""
    client: Any = redis.asyncio.Redis(unix_socket_path=str(server.socket))
    async with client:
        if upstream is None:
            await client.replicaof("NO", "ONE")
            return
        await client.replicaof("127.0.0.1", port)
        async with asyncio.timeout(20):
            while (await client.info("replication"))["master_link_status"] != "up":  # noqa: ASYNC110 -- only the server knows
                await asyncio.sleep(0.02)
        # As Sentinels do with a primary that they demote.
        await client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


@pytest.mark.faults
async def test_a_tail_that_a_server_lost_while_another_was_the_primary_is_noticed() -> None:
    """Primary again is the same process of the same server, with what the other one had."""
    ports = free_port(), free_port()
    at = [("--port", str(port), "--repl-diskless-sync-delay", "0") for port in ports]
    with store_server(*at[0]) as first, store_server(*at[1]) as second:
        store = await RedisRunStore.connect(first.url, timeout_s=10)
        run = Run(store)
        await run.create()
        await run.fill("a")
        await _becomes(second, first, ports[0])
        await _becomes(second, None, 0)
        await run.fill("lost-1", "lost-2")
        await _becomes(first, second, ports[1])
        await _becomes(first, None, 0)
        await noticed(run)
        with pytest.raises(StoreRolledBack):
            await run.fill("b")
        await run.resume()
        await run.fill("b")
        assert (await run.view()).groups["queued"].groups == 2
        await run.check()
        await store.close()


@pytest.mark.faults
async def test_a_server_that_is_the_primary_again_and_has_lost_nothing_is_not_suspected() -> None:
    ports = free_port(), free_port()
    at = [("--port", str(port), "--repl-diskless-sync-delay", "0") for port in ports]
    with store_server(*at[0]) as first, store_server(*at[1]) as second:
        store = await RedisRunStore.connect(first.url, timeout_s=10)
        run = Run(store)
        await run.create()
        await run.fill("a", "b")
        await _becomes(second, first, ports[0])
        await _becomes(second, None, 0)
        await _becomes(first, second, ports[1])
        await _becomes(first, None, 0)
        await noticed(run)
        await run.fill("c")
        assert (await run.view()).paused == ""
        await run.check()
        await store.close()
