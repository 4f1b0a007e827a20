"""Groups that one client writes to a real store and another one reads from it."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest
import redis

from buffer_wire.layout import payload_pieces
from buffer_wire.payloads.keys import group_checksum, payload_key
from buffer_wire.payloads.reader import AsyncPayloadReader, PayloadReader, PayloadsUnreadable
from buffer_wire.payloads.way import AsyncWay
from buffer_wire.payloads.writer import PayloadWriter
from buffer_wire.resp.errors import ConnectionLost
from rollout_buffer.v1 import groups_pb2, payloads_pb2
from tests.support.payload_store import RUN, PayloadStore, ask_for, payload_store

HEADER = groups_pb2.GroupHeader(task_id="t", worker_id="w")


@pytest.fixture(scope="module")
def store() -> Iterator[PayloadStore]:
    with payload_store() as running:
        yield running


@pytest.mark.parametrize("tokens", [1, 5_000, 300_000])
async def test_readers_get_the_serialized_group_that_a_writer_wrote(store: PayloadStore, tokens: int) -> None:
    columns = [np.arange(tokens, dtype="<i4"), np.ones(tokens + 1, dtype="<u1"), np.ones(3, dtype="<f4")]
    pieces = payload_pieces(columns)
    writer = PayloadWriter(RUN, "a worker", ask_for(store, "w"))
    stored = await writer.write(HEADER.SerializeToString(), pieces)
    assert stored is not None
    assert writer.direct
    group = groups_pb2.Group(header=HEADER, payload=b"".join(pieces)).SerializeToString()
    checksum = group_checksum(HEADER.SerializeToString(), stored.checksum)
    keys = [payload_key(RUN, stored.nonce, checksum, len(group))] * 8
    blocking = PayloadReader(RUN, "a trainer", lambda _: store.access("d"))
    assert blocking.open()
    assert blocking.read(keys) == [group] * 8
    assert blocking.read([]) == []
    asyncio_reader = AsyncPayloadReader(RUN, "a trainer", ask_for(store, "d"))
    assert await asyncio_reader.open()
    assert await asyncio_reader.read(keys) == [group] * 8
    await writer.close()
    await asyncio_reader.close()
    blocking.close()


async def test_a_connection_that_ends_while_it_is_idle_is_no_fault(store: PayloadStore) -> None:
    """The store ends those of a user whose time is over, which a trainer meets at its next pull."""
    blocking = PayloadReader(RUN, "a trainer", lambda _: store.access("d"))
    assert blocking.open()
    way = AsyncWay("a trainer", ask_for(store, "d"))
    opened = await way.opened()
    assert opened is not None
    store.command("CLIENT KILL USER d")
    assert blocking.open()
    with pytest.raises(ConnectionLost):
        await opened.nodes[0].connection.request([("PING",)])
    again = await way.opened()
    assert again is not None
    assert again.nodes[0] is not opened.nodes[0]
    assert (blocking.trouble, way.trouble) == ("", "")
    await way.close()
    blocking.close()


async def test_a_close_that_is_cancelled_has_ended_the_connections(store: PayloadStore) -> None:
    way = AsyncWay("a trainer", ask_for(store, "d"))
    opened = await way.opened()
    assert opened is not None
    let_go = asyncio.Event()

    async def lasts() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await let_go.wait()

    attempt = way._attempt = asyncio.create_task(lasts())
    await asyncio.sleep(0)
    closing = asyncio.create_task(way.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert opened.nodes[0].connection.lost == "closed by this side"
    let_go.set()
    await asyncio.wait([attempt])


def test_a_reader_that_is_closed_leaves_the_store_also_where_a_child_has_inherited_its_connection(
    store: PayloadStore,
) -> None:
    reader = PayloadReader(RUN, "a trainer", lambda _: store.access("d"))
    assert reader.open()
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        with redis.Redis(unix_socket_path=str(store.socket)) as keeper:
            assert "d" in {client["user"] for client in keeper.client_list()}
            reader.close()
            deadline = time.monotonic() + 10
            while "d" in {client["user"] for client in keeper.client_list()}:
                assert time.monotonic() < deadline
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("host", ["store..svc", ".svc", 64 * "x"])
def test_a_trainer_tries_the_next_address_after_one_that_is_no_name(store: PayloadStore, host: str) -> None:
    no_name = payloads_pb2.StoreAddress(host=host, port=6_379, tls=True)
    there = payloads_pb2.StoreAddress(unix_path=str(store.socket))
    reader = PayloadReader(RUN, "a trainer", lambda _: store.access("d", addresses=[no_name]))
    assert not reader.open()
    assert reader.trouble.startswith(f"the store at {host}:6379 ")
    other = PayloadReader(RUN, "a trainer", lambda _: store.access("d", addresses=[no_name, there]))
    assert other.open()
    for each in (reader, other):
        each.close()


@pytest.mark.parametrize("reply", ["*0", ":1", "*-1", "*1\r\n:5", "*1\r\n-ERR upstream failure", "*1\r\n$-1", "-ERR"])
async def test_whatever_is_answered_in_place_of_a_payload_is_unreadable(
    reply: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffer_wire.payloads.reader.READ_TIMEOUT_S", 0.5)
    over = asyncio.Semaphore(0)

    async def answer(asked: asyncio.StreamReader, answered: asyncio.StreamWriter) -> None:
        for line in ("+OK", reply):
            await asked.read(1 << 16)
            answered.write(f"{line}\r\n".encode())
        await asked.read()
        answered.close()
        over.release()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    at = payloads_pb2.StoreAddress(host="127.0.0.1", port=server.sockets[0].getsockname()[1])
    given = payloads_pb2.PayloadAccess(addresses=[at], username="d", password="d", unpushed_ms=60_000, valid_ms=600_000)

    async def ask(_trouble: str) -> payloads_pb2.PayloadAccess:
        return given

    reader, blocking = AsyncPayloadReader(RUN, "a trainer", ask), PayloadReader(RUN, "a trainer", lambda _: given)
    key = payload_key(RUN, bytes(16), 1, 1_000)
    assert await reader.open()
    with pytest.raises(PayloadsUnreadable):
        await reader.read([key])
    assert not await reader.open()
    assert await asyncio.to_thread(blocking.open)
    with pytest.raises(PayloadsUnreadable):
        await asyncio.to_thread(blocking.read, [key])
    await reader.close()
    blocking.close()
    for _ in range(2):
        await over.acquire()
    server.close()
