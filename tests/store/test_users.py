"""Users of the store for clients that move payloads themselves, on a real server: what they may do, how long."""

import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError
from redis.exceptions import ConnectionError as Cut

from buffer_service.commands import note_client
from buffer_service.domain import ops
from buffer_service.domain.ops import Direction
from buffer_service.domain.ports import UsersRefused
from buffer_service.store.keys import index_key
from buffer_service.store.redis_store import RedisRunStore
from buffer_service.store.users import PERIOD_MS, PayloadUsers
from buffer_wire.errors import UnknownRun
from tests.store.driver import RUN, Run
from tests.support.store_server import StoreServer

KEY = f"rb:p:{RUN}:0123:4567:3"
ELSEWHERE = (f"rb:p:{RUN}2:0123:4567:3", f"rb:p:{RUN}", "rb:p:other:0:0:1", index_key(RUN, "run"), "rb:runs", "x")
"""Keys that are no payloads of the run."""


@pytest.fixture(autouse=True)
async def no_users_of_other_tests(store: RedisRunStore) -> None:
    for name in await store._connection.command("ACL", "USERS"):
        if name != b"default":
            await store._connection.command("ACL", "DELUSER", name)


@contextlib.asynccontextmanager
async def entered(server: StoreServer, user: ops.StoreUser) -> AsyncIterator[Any]:
    """A client with the user's rights, on one connection."""
    client: Any = redis.asyncio.Redis(
        unix_socket_path=str(server.socket),
        username=user.name,
        password=user.password,
        single_connection_client=True,
        retry=Retry(NoBackoff(), 0),
    )
    try:
        yield await client.initialize()
    finally:
        await client.aclose()


async def user_of(run: Run, direction: Direction) -> ops.StoreUser:
    noted = await run.store.call(note_client(run.run_id, direction, "w", ""))
    return await run.store.payload_user(run.run_id, direction, noted)


async def users(run: Run) -> set[str]:
    return {name.decode() for name in await run.command("ACL", "USERS")} - {"default"}


FORBIDDEN_TO_ALL = (
    *(("DEL", KEY), ("UNLINK", KEY), ("EXPIRE", KEY, "1"), ("PERSIST", KEY), ("RENAME", KEY, KEY + "1")),
    *(("KEYS", "*"), ("SCAN", "0"), ("RANDOMKEY",), ("EXISTS", KEY), ("DUMP", KEY), ("COPY", KEY, KEY + "1")),
    *(("EVAL", "return 1", "0"), ("SCRIPT", "FLUSH"), ("FLUSHALL",), ("CONFIG", "GET", "*"), ("ACL", "LIST")),
    *(("CLIENT", "LIST"), ("INFO",), ("MONITOR",), ("SUBSCRIBE", "x"), ("PUBLISH", index_key(RUN, "notify"), "x")),
    *(("ZADD", index_key(RUN, "staging"), "0", KEY), ("MULTI",), ("SHUTDOWN",)),
)
"""Commands that neither direction may use."""


async def test_a_writer_sets_payloads_of_its_run_and_does_nothing_else(run: Run, server: StoreServer) -> None:
    await run.create()
    async with entered(server, await user_of(run, Direction.WRITE)) as writer:
        assert await writer.execute_command("SET", KEY, b"abc", "NX", "PX", 60_000)
        assert await writer.execute_command("SET", KEY, b"xyz", "NX", "PX", 60_000) is None
        assert await run.command("GET", KEY) == b"abc"
        for command in (*FORBIDDEN_TO_ALL, ("GET", KEY), ("MGET", KEY), ("SET", KEY, "x", "GET"), ("STRLEN", KEY)):
            with pytest.raises((NoPermissionError, ResponseError), match=r"permission|Permission"):
                await writer.execute_command(*command)
        for key in ELSEWHERE:
            with pytest.raises(NoPermissionError):
                await writer.execute_command("SET", key, "x")
    assert await run.command("GET", KEY) == b"abc"


async def test_a_reader_gets_payloads_of_its_run_and_does_nothing_else(run: Run, server: StoreServer) -> None:
    await run.create()
    await run.command("SET", KEY, "abc")
    async with entered(server, await user_of(run, Direction.READ)) as reader:
        assert await reader.execute_command("GET", KEY) == b"abc"
        assert await reader.execute_command("MGET", KEY, KEY + "1") == [b"abc", None]
        for command in (*FORBIDDEN_TO_ALL, ("SET", KEY, "x"), ("GETDEL", KEY), ("GETEX", KEY, "PX", "1")):
            with pytest.raises((NoPermissionError, ResponseError), match=r"permission|Permission"):
                await reader.execute_command(*command)
        for key in ELSEWHERE:
            with pytest.raises(NoPermissionError):
                await reader.execute_command("MGET", KEY, key)


async def test_every_replica_makes_the_same_user(run: Run, server: StoreServer) -> None:
    await run.create()
    first = await user_of(run, Direction.WRITE)
    other = await RedisRunStore.connect(server.url, timeout_s=10)
    try:
        async with entered(server, first) as writer:
            second = await user_of(Run(other, run.run_id), Direction.WRITE)
            assert (second.name, second.password) == (first.name, first.password)
            assert await writer.execute_command("SET", KEY, "abc", "NX"), "who is in stays in"
    finally:
        await other.close()


async def test_access_lasts_for_one_to_two_periods(run: Run) -> None:
    await run.create()
    user = await user_of(run, Direction.WRITE)
    assert PERIOD_MS < user.valid_ms <= 2 * PERIOD_MS


async def test_users_of_the_last_period_stay_and_older_ones_are_cut_off(run: Run, server: StoreServer) -> None:
    await run.create()
    made, now_ms = PayloadUsers(run.store._connection), int(time.time() * 1_000)
    present, former, old = [
        await made.make(RUN, Direction.READ, "secret", now_ms - periods * PERIOD_MS) for periods in (0, 1, 2)
    ]
    async with entered(server, former) as staying, entered(server, old) as leaving:
        await leaving.execute_command("GET", KEY)
        assert await made.expire(run.store.list_runs) == 1
        assert await users(run) == {present.name, former.name}
        await staying.execute_command("GET", KEY)
        with pytest.raises((Cut, AuthenticationError)):
            await leaving.execute_command("GET", KEY)


async def test_the_user_of_a_run_that_is_created_meanwhile_stays(run: Run) -> None:
    await run.create()
    made, now_ms = PayloadUsers(run.store._connection), int(time.time() * 1_000)
    given = [await made.make(RUN, Direction.READ, "secret", now_ms)]

    async def named() -> list[str]:
        given.append(await made.make("new", Direction.READ, "secret", now_ms))
        return [RUN]

    assert await made.expire(named) == 0
    assert await users(run) == {user.name for user in given}


async def test_a_deleted_runs_users_are_cut_off(run: Run, server: StoreServer) -> None:
    await run.create()
    user = await user_of(run, Direction.WRITE)
    async with entered(server, user) as writer:
        await writer.execute_command("SET", KEY, "abc")
        await run.store.delete_run(RUN)
        assert not await users(run)
        with pytest.raises((Cut, AuthenticationError)):
            await writer.execute_command("SET", KEY, "abc")
    with pytest.raises(UnknownRun):
        await user_of(run, Direction.WRITE)


async def test_housekeeping_leaves_users_of_others_alone(run: Run) -> None:
    await run.create()
    others = ("operator", "rb:7:gone:write:1", "rb:0:gone:admin:1", "rb:0:gone:read:now")
    for name in others:
        await run.command("ACL", "SETUSER", name)
    try:
        await run.command("ACL", "SETUSER", "rb:0:gone:read:1")
        assert await PayloadUsers(run.store._connection).expire(run.store.list_runs) == 1
        assert await users(run) >= set(others)
    finally:
        await run.command("ACL", "DELUSER", *others)


async def test_nobody_asks_and_no_user_is_made(run: Run) -> None:
    await run.create()
    await run.store.sweep()
    assert not await users(run)


async def test_a_store_that_lets_the_service_make_no_users_says_so(run: Run, server: StoreServer) -> None:
    await run.create()
    await run.command("ACL", "SETUSER", "limited", "on", ">pw", "~*", "&*", "+@all", "-acl")
    limited = await RedisRunStore.connect(server.url.replace("unix://", "unix://limited:pw@"), timeout_s=10)
    try:
        with pytest.raises(UsersRefused, match="acl"):
            await user_of(Run(limited, run.run_id), Direction.WRITE)
        await limited.sweep()
    finally:
        await limited.close()
        await run.command("ACL", "DELUSER", "limited")


async def test_a_run_keeps_why_clients_relay_until_they_no_longer_do(run: Run) -> None:
    await run.create()

    async def note(client_id: str, why: str, direction: Direction = Direction.WRITE) -> str:
        return (await run.store.call(note_client(RUN, direction, client_id, why))).former

    assert [await note("w", why) for why in ("", "out of reach", "refused", "refused")] == [
        "", "", "out of reach", "refused",
    ]  # fmt: skip
    assert await note("trainer rank 0", "timed out", Direction.READ) == ""
    await run.pass_ms(1_000)
    assert (await run.view()).relaying == [
        ops.RelayingClient("trainer rank 0", writes=False, why="timed out", silent_ms=1_000),
        ops.RelayingClient("w", writes=True, why="refused", silent_ms=1_000),
    ]
    assert await note("w", "") == "refused"
    assert [client.client_id for client in (await run.view()).relaying] == ["trainer rank 0"]
    await run.pass_ms(3_600_000)
    assert (await run.view()).relaying == []


async def test_the_clients_heard_last_are_kept(run: Run) -> None:
    await run.create()
    for number in range(70):
        await run.pass_ms(1)
        await run.store.call(note_client(RUN, Direction.WRITE, f"w{number}", "refused"))
    assert {client.client_id for client in (await run.view()).relaying} == {f"w{number}" for number in range(6, 70)}
