"""A writer of payloads and a real store, which it may lose, or be slow to be heard by."""

import asyncio
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import redis

from buffer_wire.payloads import writer as writing
from buffer_wire.payloads.writer import PayloadWriter
from buffer_wire.resp import protocol
from buffer_wire.resp.encoding import Parts, encode
from rollout_buffer.v1 import groups_pb2, payloads_pb2
from tests.support.payload_store import RUN, PayloadStore, payload_store

PAYLOAD = bytes(1 << 20)
SMALL = bytes(100)


@pytest.fixture
def store() -> Iterator[PayloadStore]:
    with payload_store("--maxmemory", "64mb") as running:
        yield running
        assert running.process is not None
        running.process.send_signal(signal.SIGCONT)


class Asking:
    """The service's part: gives access, and keeps the troubles that it is told."""

    def __init__(self, store: PayloadStore, **changed: object) -> None:
        self.store = store
        self.changed = changed
        self.user = "w"
        self.troubles: list[str] = []

    async def __call__(self, trouble: str) -> payloads_pb2.PayloadAccess:
        self.troubles.append(trouble)
        await asyncio.sleep(0)
        return self.store.access(self.user, **self.changed)


def written(store: PayloadStore) -> int:
    return int(store.command("DBSIZE")[1:])


async def write(writer: PayloadWriter, payload: Any = PAYLOAD) -> groups_pb2.StoredPayload | None:
    return await asyncio.wait_for(writer.write(b"header", payload), 20)


async def test_one_asks_for_all_and_none_is_written_twice_under_a_key(store: PayloadStore) -> None:
    ask = Asking(store)
    writer = PayloadWriter(RUN, "a worker", ask)
    places = await asyncio.gather(*(write(writer) for _ in range(16)))
    assert ask.troubles == [""]
    assert len({at.nonce for at in places if at is not None}) == written(store) == 16
    await writer.close()
    assert await write(writer) is None


async def test_small_groups_are_relayed(store: PayloadStore) -> None:
    writer = PayloadWriter(RUN, "a worker", Asking(store, direct_from_bytes=1_000))
    assert await write(writer, bytes(900)) is None
    assert await write(writer, [bytes(900), bytes(100)]) is not None
    assert writer.direct
    await writer.close()


async def test_addresses_are_tried_in_their_order(store: PayloadStore) -> None:
    nowhere = payloads_pb2.StoreAddress(unix_path=f"{store.socket}.none")
    no_name = payloads_pb2.StoreAddress(host=f"{'x' * 64}.invalid", port=1)
    there = payloads_pb2.StoreAddress(unix_path=str(store.socket))
    writer = PayloadWriter(RUN, "a worker", Asking(store, addresses=[nowhere, no_name, there]))
    assert await write(writer) is not None
    await writer.close()
    ask = Asking(store, addresses=[nowhere, no_name])
    writer = PayloadWriter(RUN, "a worker", ask)
    assert await write(writer) is None
    assert not writer.direct
    assert f"{store.socket}.none: " in writer.trouble
    assert f"{'x' * 64}.invalid:1: " in writer.trouble
    await writer.close()


async def test_what_waits_for_a_slow_store_is_not_handed_to_the_transport(
    store: PayloadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = PayloadWriter(RUN, "a worker", Asking(store))
    assert await write(writer) is not None
    way: Any = writer._way
    transport = way._way.nodes[0].connection._transport
    held = []

    def noting(commands: Sequence[Parts]) -> list[Any]:
        held.append(transport.get_write_buffer_size())
        return encode(commands)

    monkeypatch.setattr(protocol, "encode", noting)
    assert all(await asyncio.gather(*(write(writer) for _ in range(16))))
    assert len(held) == 16
    assert max(held) <= transport.get_write_buffer_limits()[1]
    await writer.close()


async def test_a_store_that_does_not_answer_in_time_is_left_and_come_back_to(
    store: PayloadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = Asking(store)
    writer = PayloadWriter(RUN, "a worker", ask)
    assert await write(writer) is not None
    monkeypatch.setattr(writing, "WRITE_TIMEOUT_S", 0.3)
    assert store.process is not None
    store.process.send_signal(signal.SIGSTOP)
    assert await asyncio.gather(*(write(writer) for _ in range(8))) == [None] * 8
    assert writer.trouble.endswith("no answer within 0.3 s")
    monkeypatch.undo()
    store.process.send_signal(signal.SIGCONT)
    async with asyncio.timeout(20):
        while await write(writer, SMALL) is None or ask.troubles[-1]:
            pass
    # Requests of one connection fail together, and are one fault.
    assert ask.troubles[1].endswith("no answer within 0.3 s")
    await writer.close()


async def test_a_full_store_relays(store: PayloadStore) -> None:
    writer = PayloadWriter(RUN, "a worker", Asking(store))
    places = [await write(writer) for _ in range(70)]
    assert None in places
    assert "OOM" in writer.trouble
    await writer.close()


async def test_a_cancelled_write_leaves_the_others_alone(store: PayloadStore) -> None:
    writer = PayloadWriter(RUN, "a worker", Asking(store))
    assert await write(writer) is not None
    first, second, third = (asyncio.create_task(write(writer)) for _ in range(3))
    await asyncio.sleep(0)
    first.cancel()
    second.cancel()
    assert await third is not None
    assert await write(writer) is not None
    await writer.close()


async def test_access_as_another_user_takes_over_without_a_write_being_lost(store: PayloadStore) -> None:
    store.let_in("w2")
    ask = Asking(store, valid_ms=1_000)
    writer = PayloadWriter(RUN, "a worker", ask)
    assert await write(writer) is not None
    ask.user = "w2"
    async with asyncio.timeout(20):
        while b"user=w2" not in _clients(store):
            assert await write(writer, SMALL) is not None
    assert ask.troubles == [""] * 2
    await writer.close()


def _clients(store: PayloadStore) -> bytes:
    client: Any = redis.Redis(unix_socket_path=str(store.socket))
    found: bytes = b" ".join(f"user={one['user']}".encode() for one in client.client_list())
    client.close()
    return found


async def test_a_connection_that_was_left_to_its_unanswered_requests_ends_with_the_writer(store: PayloadStore) -> None:
    writer = PayloadWriter(RUN, "a worker", Asking(store))
    assert await write(writer) is not None
    way = writer._way._way
    assert way is not None
    (node,) = way.nodes
    assert store.process is not None
    store.process.send_signal(signal.SIGSTOP)
    pending = asyncio.create_task(write(writer))
    while not node.connection._pending:  # noqa: ASYNC110 - a step of the loop or two
        await asyncio.sleep(0)
    writer._way._use(None)
    was_over = node.connection.is_over
    await writer.close()
    assert (was_over, node.connection.is_over) == (False, True)
    assert await pending is None
