"""The transport against a real server: lost scripts, lost connections, memory, large and many payloads."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from buffer_service import commands
from buffer_service.domain import ops
from buffer_service.store.keys import index_key
from buffer_service.store.redis_store import RedisRunStore
from buffer_service.store.transport.connection import StoreConnection
from buffer_wire.errors import StoreFault, StoreOutOfMemory, StoreUnavailable
from buffer_wire.payloads.keys import new_nonce, payload_key
from buffer_wire.resp.protocol import READ_BYTES
from tests.store.driver import Run
from tests.support.store_server import StoreServer, store_server


@pytest.fixture
async def connection(server: StoreServer) -> AsyncIterator[StoreConnection]:
    opened = StoreConnection(server.url, timeout_s=10)
    await opened.command("FLUSHALL")
    yield opened
    await opened.close()


async def test_scripts_that_the_store_forgot_are_loaded_again(run: Run) -> None:
    await run.create()
    await run.command("SCRIPT", "FLUSH")
    await run.submit("a")
    lease = await run.one_lease()
    await run.command("SCRIPT", "FLUSH")
    assert await run.push_kinds(run.group(lease, b"kept")) == ["queued"]
    await run.fill("b")
    await run.command("SCRIPT", "FLUSH")
    assert await run.bodies(await run.batch(0)) == [b"kept", b"body-b"]
    await run.check()


SIZES = [0, 1, 100, (1 << 14) - 1, 1 << 14, (1 << 14) + 1, (1 << 15) + 1, READ_BYTES - 7, READ_BYTES, READ_BYTES + 1]


@pytest.mark.parametrize("size", [*SIZES, 3_000_000, 6_000_000])
async def test_a_payload_comes_back_byte_for_byte(run: Run, size: int) -> None:
    await run.create()
    body = random.Random(size).randbytes(size)
    await run.push(run.group("a", body), run.group("b", b"next"))
    assert await run.bodies(await run.batch(0)) == [body, b"next"]


async def test_bodies_may_be_any_buffer(run: Run) -> None:
    await run.create(batch_groups=3)
    body = bytes(range(256)) * 100
    for name, kind in (("a", bytes), ("b", bytearray), ("c", memoryview)):
        group = run.group(name, kind(body))  # type: ignore[arg-type]
        assert await run.push_kinds(group) == ["queued"]
    assert await run.bodies(await run.batch(0)) == [body] * 3


async def test_many_callers_share_the_connections(run: Run) -> None:
    await run.create(batch_groups=200, max_queued_groups=200)
    sizes = [random.Random(i).choice([10, 5_000, 40_000, 300_000]) for i in range(200)]
    bodies = {f"t{i}": random.Random(i).randbytes(size) for i, size in enumerate(sizes)}
    await asyncio.gather(*(run.push(run.group(name, body)) for name, body in bodies.items()))
    batch = await run.batch(0)
    parts = await asyncio.gather(*(run.store.fetch(run.run_id, [g.payload_key]) for g in batch.shard))
    fetched = {g.group_id.removesuffix("/0"): bytes(part[0] or b"") for g, part in zip(batch.shard, parts, strict=True)}
    assert fetched == bodies


async def test_a_cancelled_caller_does_not_disturb_the_others(connection: StoreConnection) -> None:
    async def echo(number: int) -> bytes:
        reply: bytes = await connection.command("ECHO", b"%d" % number * 1000)
        return reply

    calls = [asyncio.create_task(echo(number)) for number in range(50)]
    await asyncio.sleep(0)
    for call in calls[::2]:
        call.cancel()
    replies = await asyncio.gather(*calls, return_exceptions=True)
    assert replies[1::2] == [b"%d" % number * 1000 for number in range(1, 50, 2)]
    assert all(isinstance(reply, asyncio.CancelledError) for reply in replies[::2])


async def test_absent_payloads_are_none(connection: StoreConnection) -> None:
    key, gone = payload_key("r", new_nonce(), 0, 4), payload_key("r", new_nonce(), 0, 4)
    await connection.command("SET", key, b"body")
    assert await connection.fetch([gone, key, gone]) == [None, b"body", None]
    assert await connection.fetch([]) == []


async def test_an_error_reply_is_a_fault_that_quotes_it(connection: StoreConnection) -> None:
    with pytest.raises(StoreFault, match="unknown command"):
        await connection.command("NOSUCH", "x")
    assert await connection.command("ECHO", "still there") == b"still there"


async def test_a_store_that_does_not_answer_is_unavailable_in_time(server: StoreServer) -> None:
    impatient = StoreConnection(server.url, timeout_s=0.2)
    with pytest.raises(StoreUnavailable, match=r"within 0\.2 s"):
        await impatient.command("BLPOP", "nothing", 0)
    assert await impatient.command("PING") == b"PONG"
    await impatient.close()


async def test_a_killed_connection_is_made_again(connection: StoreConnection) -> None:
    number = await connection.command("CLIENT", "ID")
    other = StoreConnection(connection.address.shown)
    waiting = asyncio.create_task(connection.command("BLPOP", "nothing", 0))
    while b"cmd=blpop" not in await other.command("CLIENT", "LIST", "ID", number):
        pass
    await other.command("CLIENT", "KILL", "ID", number)
    with pytest.raises(StoreUnavailable):
        await waiting
    await other.close()
    assert await connection.command("PING") == b"PONG"


async def test_no_connection_begins_once_this_side_has_closed(connection: StoreConnection) -> None:
    before = (await connection.command("CLIENT", "LIST")).count(b"id=")
    closed = StoreConnection(connection.address.shown)
    beginning = asyncio.create_task(closed.connect())
    await asyncio.sleep(0)
    await closed.close()
    with pytest.raises(StoreUnavailable, match="closed by this side"):
        await beginning
    with pytest.raises(StoreUnavailable, match="closed by this side"):
        await closed.command("PING")
    while (await connection.command("CLIENT", "LIST")).count(b"id=") > before:
        pass


@pytest.mark.faults
async def test_a_killed_store_is_unavailable_and_then_used_again() -> None:
    with store_server("--appendonly", "yes", "--appendfsync", "no") as server:
        store = await RedisRunStore.connect(server.url)
        run = Run(store)
        await run.create()
        await run.fill("a")
        server.kill()
        with pytest.raises(StoreUnavailable):
            await run.push(run.group("b"))
        with pytest.raises(StoreUnavailable):
            await run.view()
        server.start()
        # Its scripts are gone, its data is not.
        await run.fill("b")
        assert await run.bodies(await run.batch(0)) == [b"body-a", b"body-b"]
        await run.check()
        await store.close()


async def test_near_maxmemory_nothing_is_indexed_whose_payload_failed() -> None:
    with store_server("--maxmemory", "24mb", "--maxmemory-policy", "noeviction") as server:
        store = await RedisRunStore.connect(server.url)
        run = Run(store)
        await run.create(max_queued_groups=1000)
        await run.submit("leased")
        lease = await run.one_lease()
        accepted, refused = 0, 0
        while refused < 20:
            groups = [run.group(f"t{accepted}-{i}", bytes(400_000)) for i in range(3)]
            try:
                await run.push(*groups)
                accepted += 3
            except StoreOutOfMemory:
                refused += 1
        assert accepted >= 3
        await run.command("CONFIG", "SET", "maxmemory", 1)
        with pytest.raises(StoreOutOfMemory):
            await run.submit("more")
        assert await run.ledger() == {"accepted": accepted, "queued": accepted}
        assert await run.payload_keys() == await run.living_keys()
        assert await run.command("EXISTS", index_key(run.run_id, "staging")) == 0
        # Whatever frees memory goes on: leases, batches, progress, the sweep.
        assert (await store.call(commands.extend(run.run_id, "w", "i", [lease.lease_id]))).states == [
            ops.LeaseState.LIVE
        ]
        assert await run.give_back(lease) == ["pending"]
        assert (await run.one_lease()).attempt == 2
        await run.batch(0)
        await run.publish(1, commit_through=0)
        await run.checkpoint(0)
        # The checkpoint has deleted what it freed, memory or not, and the sweep has nothing left to delete.
        assert await run.payload_keys() == await run.living_keys()
        assert await store.sweep() == 0
        with pytest.raises(StoreOutOfMemory):
            await run.push(run.group("again"))
        await run.command("CONFIG", "SET", "maxmemory", "24mb")
        assert await run.push_kinds(run.group("again", bytes(100_000))) == ["queued"]
        await run.check()
        await store.close()
