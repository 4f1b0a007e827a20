"""Payloads in parts: written to a real store and read from it, whole, without one of them, and with a damaged one."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import redis

from buffer_wire.codec import group_head
from buffer_wire.payloads.keys import WHOLE_BYTES, group_checksum, part_keys, payload_key
from buffer_wire.payloads.parts import PartsCheck
from buffer_wire.payloads.reader import AsyncPayloadReader, PayloadReader, PayloadsUnreadable
from buffer_wire.payloads.writer import PARTS_UNDER_WAY, PayloadWriter
from buffer_wire.resp.encoding import Parts
from rollout_buffer.v1 import groups_pb2
from tests.support.payload_store import RUN, PayloadStore, ask_for, payload_store

HEADER = groups_pb2.GroupHeader(task_id="t", worker_id="w").SerializeToString()
LIMIT = 512 << 20
SIZES = (20 << 20, 100, WHOLE_BYTES + 1)


@pytest.fixture
def store() -> Iterator[PayloadStore]:
    with payload_store() as running:
        yield running


@pytest.fixture
def client(store: PayloadStore) -> Iterator[Any]:
    with redis.Redis(unix_socket_path=str(store.socket)) as connected:
        yield connected


def pieces_of(size: int) -> list[memoryview]:
    """A payload in pieces that end where no part does."""
    whole = np.random.default_rng(size).integers(0, 256, size, np.uint8).data
    return [whole[:1], whole[1:9_000_001], whole[9_000_001:9_000_001], whole[9_000_001:]]


async def write(store: PayloadStore, size: int, max_group_bytes: int = LIMIT) -> str:
    writer = PayloadWriter(RUN, "a worker", ask_for(store, "w", max_group_bytes=max_group_bytes))
    stored = await writer.write(HEADER, pieces_of(size))
    await writer.close()
    assert stored is not None
    size += len(group_head(HEADER, size))
    return payload_key(RUN, stored.nonce, group_checksum(HEADER, stored.checksum), size, stored.parts)


async def read(store: PayloadStore, keys: list[str]) -> list[memoryview]:
    """The payloads, which both readers read alike; raises what they say of it, which is the same too."""
    blocking = PayloadReader(RUN, "a trainer", lambda _: store.access("d"))
    other = AsyncPayloadReader(RUN, "a trainer", ask_for(store, "d"))
    assert await asyncio.to_thread(blocking.open)
    assert await other.open()
    try:
        came = await asyncio.to_thread(blocking.read, keys)
    except PayloadsUnreadable:
        with pytest.raises(PayloadsUnreadable, match=keys[0]):
            await other.read(keys)
        raise
    finally:
        blocking.close()
    assert await other.read(keys) == came
    await other.close()
    return came


async def test_what_is_written_in_parts_is_read_as_it_was(store: PayloadStore, client: Any) -> None:
    keys = [await write(store, size) for size in SIZES]
    expected = sorted(part.key.encode() for key in keys for part in part_keys(key))
    assert sorted(client.keys()) == expected
    assert [client.strlen(part.key) for part in part_keys(keys[0])] == [part.size for part in part_keys(keys[0])]
    assert all(0 < client.pttl(key) <= 60_000 for key in client.scan_iter())
    # Whole payloads before, between and after those in parts.
    for size, group in zip(SIZES * 2, await read(store, keys * 2), strict=True):
        assert groups_pb2.Group.FromString(bytes(group)).payload == b"".join(pieces_of(size))


async def test_a_client_that_knows_no_parts_writes_one_key_which_is_read(store: PayloadStore, client: Any) -> None:
    """Its service, of a version before, says no limit of a group."""
    key = await write(store, 20 << 20, max_group_bytes=0)
    assert client.keys() == [key.encode()]
    assert len((await read(store, [key]))[0]) == client.strlen(key)


@pytest.mark.parametrize("part", [0, 1, -1])
@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(lambda client, key: client.delete(key), id="gone"),
        pytest.param(lambda client, key: client.setrange(key, 100_000, b"damaged"), id="damaged"),
        pytest.param(lambda client, key: client.append(key, b"more"), id="longer"),
        pytest.param(lambda client, key: client.set(key, b"shorter"), id="shorter"),
    ],
)
async def test_a_payload_of_which_one_part_is_missing_or_wrong_is_not_read(
    store: PayloadStore, client: Any, part: int, harm: Callable[[Any, str], None]
) -> None:
    key = await write(store, 20 << 20)
    check = PartsCheck(key)
    for one in part_keys(key):
        check.see(client.get(one.key))
    assert check.is_good
    harm(client, part_keys(key)[part].key)
    with pytest.raises(PayloadsUnreadable, match=rf"{key}"):
        await read(store, [key])
    check = PartsCheck(key)
    for one in part_keys(key):
        check.see(client.get(one.key) or b"")
    assert not check.is_good


async def test_few_parts_are_under_way_at_once_and_a_write_that_fails_leaves_some_that_expire(
    store: PayloadStore, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = PayloadWriter(RUN, "a worker", ask_for(store, "w", max_group_bytes=LIMIT))
    way: Any = writer._way
    answered, under_way, most, begun = way.answered, 0, 0, 0

    async def failing(connection: object, command: Parts, timeout_s: float) -> object:
        nonlocal under_way, most, begun
        under_way, begun = under_way + 1, begun + 1
        most = max(most, under_way)
        if begun == 3 * PARTS_UNDER_WAY:
            client.config_set("maxmemory", "1mb")
        try:
            return await answered(connection, command, timeout_s)
        finally:
            under_way -= 1

    monkeypatch.setattr(way, "answered", failing)
    assert await writer.write(HEADER, pieces_of(60 << 20)) is None
    assert most == PARTS_UNDER_WAY
    assert under_way == 0
    assert "OOM" in writer.trouble
    assert 0 < len(client.keys()) < begun < 31
    assert all(client.pttl(key) > 0 for key in client.scan_iter())
    await writer.close()
