"""Clients that write to and read from a cluster of real servers themselves, while its nodes die and its slots move."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from buffer_wire.codec import group_head
from buffer_wire.payloads import nodes, way
from buffer_wire.payloads import writer as writing
from buffer_wire.payloads.keys import all_part_keys, group_checksum, payload_key
from buffer_wire.payloads.reader import AsyncPayloadReader, PayloadReader, PayloadsUnreadable
from buffer_wire.payloads.writer import PayloadWriter
from tests.support.cluster_access import RUN, Access, let_in
from tests.support.store_cluster import Node, StoreCluster, store_cluster

pytestmark = pytest.mark.timeout(90)

HEADER = b"header"


@pytest.fixture(scope="module")
def cluster() -> Iterator[StoreCluster]:
    with store_cluster() as running:
        # The rights of users are not replicated.
        let_in(running.nodes)
        yield running


def body_of(number: int, size: int = 40_000) -> bytes:
    return number.to_bytes(4) * (size // 4)


class Writer:
    """A writer whose groups are numbered. `keys` are those that it has written, by number."""

    def __init__(self, access: Access) -> None:
        self.writer = PayloadWriter(RUN, "a worker", access)
        self.keys: dict[int, str] = {}
        self.relayed: list[int] = []

    async def write(self, number: int, size: int = 40_000) -> bool:
        body = body_of(number, size)
        stored = await asyncio.wait_for(self.writer.write(HEADER, body), 20)
        if stored is None:
            self.relayed.append(number)
            return False
        whole = len(group_head(HEADER, len(body))) + len(body)
        checksum = group_checksum(HEADER, stored.checksum)
        self.keys[number] = payload_key(RUN, stored.nonce, checksum, whole, stored.parts)
        return True


async def read(readers: tuple[PayloadReader, AsyncPayloadReader], keys: Sequence[str]) -> list[bytes]:
    """Bodies without their headers, which both readers read alike."""
    blocking, other = readers
    assert await asyncio.to_thread(blocking.open)
    assert await other.open()
    bodies = await asyncio.to_thread(blocking.read, keys)
    assert bodies == await other.read(keys)
    return [bytes(body)[len(group_head(HEADER, len(body) - 20)) :] for body in bodies]


async def until(met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not met():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def until_direct(writer: Writer) -> None:
    """Write until it goes directly."""
    while not await writer.write(0):  # noqa: ASYNC110 - there is nothing to be told of
        await asyncio.sleep(0.01)


@pytest.fixture
def readers(cluster: StoreCluster) -> Iterator[tuple[PayloadReader, AsyncPayloadReader]]:
    access = Access(cluster, "d")
    blocking = PayloadReader(RUN, "a trainer", access.give)
    yield blocking, AsyncPayloadReader(RUN, "a trainer", access)
    blocking.close()


def in_step(cluster: StoreCluster) -> None:
    """Have all that is written so far on the replicas."""
    for shard in range(3):
        assert cluster.primary(shard).do("WAIT", 1, 5_000) == 1


async def test_groups_go_to_all_shards_and_come_back_in_order_also_those_in_parts(
    cluster: StoreCluster, readers: tuple[PayloadReader, AsyncPayloadReader]
) -> None:
    access = Access(cluster, "w")
    writer = Writer(access)
    sizes = [40_000, 9 << 20, 400, *[90_000] * 160, 30 << 20, 4]
    assert all([await writer.write(number, size) for number, size in enumerate(sizes)])
    lie = cluster.keys(f"rb:p:{RUN}:*")
    assert set().union(*lie) == set(all_part_keys(writer.keys.values()))
    assert min(map(len, lie)) > 30
    came = await read(readers, list(writer.keys.values()))
    assert [body[-4:] for body in came] == [number.to_bytes(4) for number in range(len(sizes))]
    assert [len(body) for body in came] == sizes
    assert await read(readers, list(writer.keys.values())[::-1]) == came[::-1]
    assert access.troubles == [""]
    await writer.writer.close()
    await readers[1].close()


async def test_slots_that_move_while_groups_are_written_and_read_have_nothing_relayed(
    cluster: StoreCluster, readers: tuple[PayloadReader, AsyncPayloadReader]
) -> None:
    access = Access(cluster, "w")
    writer = Writer(access)
    assert all([await writer.write(number) for number in range(60)])
    assert await read(readers, list(writer.keys.values())) == [body_of(number) for number in range(60)]
    first, last, _ = next(at for at in cluster.slots() if cluster.shard_of_slot(at[0]) == 0)
    moving = asyncio.create_task(asyncio.to_thread(cluster.migrate, first, (first + last) // 2, 2))
    number = 60
    while not moving.done() or len(access.troubles) == 1:
        await writer.write(number)
        number += 1
    await moving
    assert not writer.relayed
    assert any("MOVED" in trouble and trouble.startswith("shard ") for trouble in access.troubles), access.troubles
    assert await read(readers, list(writer.keys.values())) == [body_of(at) for at in range(number)]
    cluster.migrate(first, (first + last) // 2, 0)
    await writer.writer.close()
    await readers[1].close()


async def test_after_a_failover_all_goes_directly_again_and_what_was_written_is_read(
    cluster: StoreCluster, readers: tuple[PayloadReader, AsyncPayloadReader]
) -> None:
    access = Access(cluster, "w")
    writer = Writer(access)
    assert all([await writer.write(number) for number in range(60)])
    assert await read(readers, list(writer.keys.values())) == [body_of(number) for number in range(60)]
    in_step(cluster)
    killed = cluster.kill(1)
    promoting = asyncio.create_task(asyncio.to_thread(cluster.until_promoted, 1))
    number = 60
    while not promoting.done() or writer.relayed[-1:] == [number - 1]:
        await writer.write(number)
        number += 1
        await asyncio.sleep(0.005)
    assert writer.relayed, "a shard without a primary has all relayed"
    assert any("shard 2 of 3 at " in trouble or "shard 1 of 3 at" in trouble for trouble in access.troubles)
    came = None
    while came is None:
        try:
            came = await read(readers, list(writer.keys.values()))
        except (PayloadsUnreadable, AssertionError):
            await asyncio.sleep(0.1)
    assert came == [body_of(at) for at in writer.keys]
    cluster.restart(killed)
    # It came back without its users, as after every restart.
    let_in([killed])
    await writer.writer.close()
    await readers[1].close()


async def test_a_host_that_is_gone_holds_up_its_own_shard_alone_until_its_replica_serves(
    cluster: StoreCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "WRITE_TIMEOUT_S", 0.5)
    access = Access(cluster, "w")
    writer = Writer(access)
    assert all([await writer.write(number) for number in range(30)])
    gone = cluster.primary(0)
    cluster.freeze(gone)
    try:
        began = time.monotonic()
        await asyncio.gather(*(writer.write(number) for number in range(30, 60)))
        assert writer.relayed
        assert len(writer.keys) > 30, "the other shards answer"
        assert time.monotonic() - began < 0.5 + nodes.CONNECT_TIMEOUT_S + 1
        await asyncio.to_thread(cluster.until_promoted, 0)
        await until_direct(writer)
        writer.relayed.clear()
        assert all([await writer.write(number) for number in range(60, 120)])
    finally:
        cluster.thaw(gone)
        cluster.until_whole()
    assert set(cluster.keys()[0]) & set(writer.keys.values())
    await writer.writer.close()


async def test_connections_that_are_as_good_as_new_ones_are_kept(cluster: StoreCluster) -> None:
    access = Access(cluster, "w", valid_ms=1_000)
    asyncio_way = way.AsyncWay("a client", access)
    former = renewed = await asyncio_way.opened()
    assert former is not None
    while len(access.troubles) < 3:
        renewed = await asyncio_way.opened()
        await asyncio.sleep(0.01)
    assert renewed is not None
    assert list(renewed.nodes) == list(former.nodes)
    left = renewed.nodes[0]
    left.connection.abort("by the test")
    again = await asyncio_way.opened()
    assert again is not None
    assert left not in again.nodes
    assert set(again.nodes) >= set(former.nodes[1:])
    await asyncio_way.close()


async def test_a_client_that_is_closed_while_it_connects_leaves_no_connection_behind(cluster: StoreCluster) -> None:
    def connected(node: Node) -> bool:
        return b"user=w" in node.do("CLIENT", "LIST")

    silent = cluster.primary(2)
    cluster.freeze(silent)
    try:
        client = way.AsyncWay("a client", Access(cluster, "w"))
        opening = asyncio.create_task(client.opened())
        await until(lambda: all(connected(cluster.primary(shard)) for shard in (0, 1)))
        await client.close()
        assert await opening is None
    finally:
        cluster.thaw(silent)
    await until(lambda: not any(connected(node) for node in cluster.nodes))


async def test_a_node_that_does_not_know_the_user_has_all_relayed_and_is_named(cluster: StoreCluster) -> None:
    primary = cluster.primary(2)
    primary.do("ACL", "DELUSER", "w")
    access = Access(cluster, "w")
    writer = Writer(access)
    assert not await writer.write(0)
    assert f"at 127.0.0.1:{primary.port}: WRONGPASS" in writer.writer.trouble
    let_in([primary])
    await until_direct(writer)
    await writer.writer.close()


async def test_slots_that_nobody_serves_are_relayed_and_asked_about(cluster: StoreCluster) -> None:
    writer = Writer(Access(cluster, "w"))
    assert all([await writer.write(number) for number in range(30)])
    part = Access(cluster, "w").give("").shards[0]
    access = Access(cluster, "w", shards=[part])
    narrow = Writer(access)
    assert not all([await narrow.write(number) for number in range(8)])
    assert "nobody serves the slot of rb:p:" in access.troubles[1]
    for_reader = [Access(cluster, "d", shards=[part]) for _ in range(2)]
    blocking = PayloadReader(RUN, "a trainer", for_reader[0].give)
    other = AsyncPayloadReader(RUN, "a trainer", for_reader[1])
    assert await asyncio.to_thread(blocking.open)
    assert await other.open()
    with pytest.raises(PayloadsUnreadable, match="nobody serves the slot"):
        await asyncio.to_thread(blocking.read, list(writer.keys.values()))
    with pytest.raises(PayloadsUnreadable, match="nobody serves the slot"):
        await other.read(list(writer.keys.values()))
    for asked in for_reader:
        assert len(asked.troubles) == 2
        assert "nobody serves the slot" in asked.troubles[1]
    blocking.close()
    for each in (other, writer.writer, narrow.writer):
        await each.close()
