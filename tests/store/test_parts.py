"""Payloads in parts that the service itself writes: bodies of pushes, and partial rollouts."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from buffer_service import commands
from buffer_service.domain import ops
from buffer_service.domain.policy import OverflowAction
from buffer_service.store.keys import SCHEMA_VERSION, index_key
from buffer_wire.errors import LayoutChanged, StoreOutOfMemory, StoreUnavailable
from tests.store.driver import Run, emptied
from tests.support.small_parts import parts_of_bytes
from tests.support.store_cluster import StoreCluster
from tests.support.store_server import StoreServer

BODY = b"relayed"
PARTS = [b"rel", b"aye", b"d"]


@pytest.fixture
async def run(server: StoreServer, cluster: StoreCluster | None) -> AsyncIterator[Run]:
    with parts_of_bytes(3):
        store = await emptied(server, cluster)
        yield Run(store)
        await store.close()


async def layout(run: Run) -> str:
    return str((await run.command("HGET", index_key(run.run_id, "run"), "layout")).decode())


async def test_a_relayed_body_lies_in_parts_and_is_read_whole_and_in_pieces(run: Run) -> None:
    await run.create()
    assert await run.push_kinds(run.group("a", b"one"), run.group("b", BODY)) == ["queued", "queued"]
    batch = await run.batch(0)
    assert await run.bodies(batch) == [b"one", BODY]
    key = batch.shard[1].payload_key
    assert [await run.command("GET", f"{key}.{index}") for index in range(4)] == [*PARTS, None]
    assert await run.command("EXISTS", key) == 0
    for first in range(8):
        assert await run.store.read_payload(key, first, 4) == BODY[first : first + 4]
    # Nothing says that it was a pusher's.
    assert (await run.view()).statistics["written_groups"] == 0
    await run.check()
    await run.commit(0)
    await run.checkpoint(0)
    assert await run.payload_keys() == set()


@pytest.mark.parametrize("part", [0, 2])
async def test_a_body_of_which_a_part_is_gone_is_gone(run: Run, part: int) -> None:
    await run.create(batch_groups=1)
    await run.push_kinds(run.group("a", BODY))
    batch = await run.batch(0)
    await run.command("UNLINK", f"{batch.shard[0].payload_key}.{part}")
    assert await run.bodies(batch) == [b"(gone)"]
    assert await run.store.read_payload(batch.shard[0].payload_key, 3 * part, 3) == b""
    await run.lose(0, "a/0")
    await run.check()


async def test_a_partial_rollout_lies_in_parts_until_the_task_needs_it_no_more(run: Run) -> None:
    await run.create()
    await run.submit("t")
    lease = await run.one_lease()
    assert await run.give_back(lease, partial_rollout=BODY, head=ops.WeightVersion(1, 0), tokens=3) == ["pending"]
    assert len(await run.payload_keys()) == len(PARTS)
    lease = await run.one_lease()
    assert lease.partial_rollout == BODY
    await run.check()
    assert await run.push_kinds(run.group(lease, b"two")) == ["queued"]
    await run.check()
    assert len(await run.payload_keys()) == 1


async def test_what_fails_between_two_parts_leaves_parts_that_expire(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is left of the service then: nothing names the parts, and no sweep looks for them."""
    await run.create()
    connection: Any = run.store._connection
    exchange = connection._exchange
    commands_of = exchange.commands
    written = []

    async def dying(link: object, sent: Any, *more: Any) -> Any:
        if sent[0][0] == "SET":
            written.append(sent)
            if len(written) == 3:
                raise asyncio.CancelledError
        return await commands_of(link, sent, *more)

    monkeypatch.setattr(exchange, "commands", dying)
    with pytest.raises(asyncio.CancelledError):
        await run.push(run.group("a", BODY))
    monkeypatch.undo()
    assert await run.payload_keys() == set()
    assert len(await run.unpushed_keys()) == 2
    assert await run.members("staging") == []
    assert await run.push_kinds(run.group("a", BODY)) == ["queued"]
    await run.check()


async def test_parts_that_another_server_has_are_not_indexed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failover between the parts and the push may have lost them."""
    await run.create()
    connection: Any = run.store._connection
    write = connection._write_parts

    async def failing_over(key: str, body: ops.Buffer, tenure: str) -> str:
        return f"{await write(key, body, tenure)} of before"

    monkeypatch.setattr(connection, "_write_parts", failing_over)
    with pytest.raises(StoreUnavailable, match="the primary has changed between the parts of a payload and their push"):
        await run.push(run.group("a", BODY))
    monkeypatch.undo()
    assert await run.ledger() == {}
    assert await run.push_kinds(run.group("a", BODY)) == ["queued"]
    await run.check()


async def test_a_store_without_memory_refuses_the_parts_and_keeps_none(run: Run) -> None:
    await run.create()
    await run.command("CONFIG", "SET", "maxmemory", 1)
    try:
        with pytest.raises(StoreOutOfMemory):
            await run.push(run.group("a", BODY))
    finally:
        await run.command("CONFIG", "SET", "maxmemory", 0)
    assert await run.command("KEYS", "rb:p:*") == []
    assert await run.push_kinds(run.group("a", BODY)) == ["queued"]


async def test_a_run_is_deleted_with_its_parts(run: Run) -> None:
    await run.create(overflow_action=OverflowAction.BLOCK, max_queued_groups=2)
    blocked = await run.write(run.group("c", BODY))
    await run.fill("a", "b")
    assert await run.push_kinds(blocked, run.group("d", BODY)) == ["blocked", "blocked"]
    await run.store.delete_run(run.run_id)
    assert await run.command("KEYS", "rb:*") == [run.names[1].encode()]


async def test_a_service_that_knows_no_parts_refuses_a_run_that_has_had_one(run: Run) -> None:
    """It would read the payload's own key, find nothing there, and report the group lost."""
    await run.create()
    await run.push_kinds(run.group("a", b"one"))
    assert await layout(run) == str(SCHEMA_VERSION)
    written = await run.write(run.group("b", BODY))
    await run.push_kinds(written)
    assert await layout(run) == f"{SCHEMA_VERSION}p"
    connection: Any = run.store._connection
    old = connection._scripts["view"].source.replace(f" and found ~= '{SCHEMA_VERSION}p'", "")
    assert old != connection._scripts["view"].source
    sha = await run.command("SCRIPT", "LOAD", old)
    connection._scripts = connection._scripts | {"view": type(connection._scripts["view"])("view", old, sha.decode())}
    with pytest.raises(LayoutChanged) as refusal:
        await run.store.call(commands.view(run.run_id))
    assert refusal.value.attributes["found"] == f"{SCHEMA_VERSION}p"
