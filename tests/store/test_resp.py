"""The protocol and its failures, against a scripted server."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from buffer_service.commands.replies import pack
from buffer_service.domain.command import Command
from buffer_service.store.transport import exchange as exchange_module
from buffer_service.store.transport.connection import StoreConnection
from buffer_service.store.transport.resp import READ_BYTES, ReplyError, RespConnection, encode
from buffer_wire.errors import StoreFault, StoreOutOfDisk, StoreUnavailable

Answer = Callable[[list[bytes]], bytes]


def bulk(body: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(body), body)


INTRODUCTION = {
    b"INFO server": bulk(b"# Server\r\nrun_id:abc\r\n"),
    b"INFO replication": bulk(b"role:master\r\nmaster_replid:def\r\n"),
    b"INFO memory": bulk(b"maxmemory_policy:noeviction\r\n"),
    b"INFO persistence": bulk(b"aof_enabled:0\r\n"),
    b"ROLE": b"*3\r\n$6\r\nmaster\r\n:0\r\n*0\r\n",
}


@contextlib.asynccontextmanager
async def scripted(path: Path, answer: Answer, *, portion: int = 1 << 20) -> AsyncIterator[str]:
    """A server that introduces itself and answers every other command as told, in writes of `portion` bytes."""

    serving: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                count = int((await reader.readuntil(b"\r\n"))[1:])
                command = []
                for _ in range(count):
                    size = int((await reader.readuntil(b"\r\n"))[1:])
                    command.append((await reader.readexactly(size + 2))[:-2])
                reply = INTRODUCTION.get(b" ".join(command)) or answer(command)
                for first in range(0, len(reply), portion):
                    writer.write(reply[first : first + portion])
                    await writer.drain()
                    await asyncio.sleep(0)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.create_task(serve(reader, writer)))

    server = await asyncio.start_unix_server(accept, path)
    try:
        yield f"unix://{path}"
    finally:
        server.close()
        # Each ends when its client has closed.
        await asyncio.gather(*serving)
        await server.wait_closed()


async def exchange(url: str, *commands: tuple[Any, ...]) -> list[Any]:
    path = url.removeprefix("unix://")
    _, opened = await asyncio.get_running_loop().create_unix_connection(RespConnection, path)
    try:
        return await opened.request(commands)
    finally:
        opened.abort("done")


LARGE = bytes(range(256)) * 400
ALL_KINDS = b"*7\r\n+OK\r\n:-42\r\n$-1\r\n*0\r\n*2\r\n$2\r\n\r\n\r\n$%d\r\n%b\r\n-ERR no\r\n*-1\r\n" % (
    len(LARGE),
    LARGE,
)


@pytest.mark.parametrize("portion", [1, 2, 3, 7, 1000, 40_000, 1 << 20])
async def test_replies_are_parsed_however_they_are_cut(tmp_path: Path, portion: int) -> None:
    # Small cuts take a turn of the loop for every few bytes: a smaller body will do.
    body = LARGE if portion >= 7 else LARGE[:500]
    reply = ALL_KINDS if portion >= 7 else ALL_KINDS.replace(b"$%d\r\n%b" % (len(LARGE), LARGE), b"$500\r\n" + body)
    async with scripted(tmp_path / "s", lambda _: reply, portion=portion) as url:
        first, second = await exchange(url, ("A",), ("B",))
    for simple, pair, error, absent in ((reply[:4], *reply[4:]) for reply in (first, second)):
        assert simple == [b"OK", -42, None, []]
        assert [bytes(part) for part in pair] == [b"\r\n", body]
        assert isinstance(error, ReplyError)
        assert (error.code, absent) == ("ERR", None)


async def test_a_reply_longer_than_the_read_buffer_is_parsed_as_it_comes(tmp_path: Path) -> None:
    item = b"x" * 30_000
    count = 3 * READ_BYTES // len(item)
    reply = b"*%d\r\n" % count + b"$%d\r\n%b\r\n" % (len(item), item) * count
    async with scripted(tmp_path / "s", lambda _: reply, portion=9_999) as url:
        (items,) = await exchange(url, ("A",))
    assert items == [item] * count


@pytest.mark.parametrize("part", [b"", b"\r\n", "text ü", 12, -1, bytearray(b"x" * 20_000), memoryview(b"y" * 20_000)])
async def test_commands_arrive_as_they_were_given(tmp_path: Path, part: Any) -> None:
    arrived: list[list[bytes]] = []

    def answer(command: list[bytes]) -> bytes:
        arrived.append(command)
        return b"+OK\r\n"

    async with scripted(tmp_path / "s", answer) as url:
        await exchange(url, ("SET", "key", part, "after"), ("PING",))
    expected = bytes(part) if isinstance(part, (bytes, bytearray, memoryview)) else str(part).encode()
    assert arrived == [[b"SET", b"key", expected, b"after"], [b"PING"]]


def test_large_bodies_are_not_copied() -> None:
    body = bytes(1 << 20)
    assert any(part is body for part in encode([("SET", "key", body), ("PING",)]))


async def test_a_connection_that_ends_ends_every_request(tmp_path: Path) -> None:
    def answer(command: list[bytes]) -> bytes:
        if command == [b"END"]:
            raise ConnectionResetError
        return b"+OK\r\n"

    async with scripted(tmp_path / "s", answer) as url:
        store = StoreConnection(url)
        assert await store.command("PING") == b"OK"
        outcomes = await asyncio.gather(store.command("END"), store.command("PING"), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [StoreUnavailable, StoreUnavailable]
        assert await store.command("PING") == b"OK"
        await store.close()


def loading(times: int, then: Answer) -> Answer:
    """Refuse the first commands as a store does that loads its data: MULTI passes, its commands do not."""
    refusals = iter(range(times))
    spoilt = False

    def answer(command: list[bytes]) -> bytes:
        nonlocal spoilt
        if command == [b"MULTI"]:
            spoilt = False
            return b"+OK\r\n"
        if command == [b"EXEC"] and spoilt:
            return b"-EXECABORT Transaction discarded because of previous errors.\r\n"
        if next(refusals, None) is not None:
            spoilt = True
            return b"-LOADING the dataset in memory\r\n"
        return then(command)

    return answer


async def test_requests_wait_while_the_store_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "LOADING_PAUSE_S", 0.0)

    def then(command: list[bytes]) -> bytes:
        if command == [b"EXEC"]:
            return b"*3\r\n:1\r\n+OK\r\n" + bulk(pack("done", 7))
        if command[0] in {b"HGET", b"EVAL"}:
            return bulk(pack("claimed")) if command[0] == b"EVAL" else b"$-1\r\n"
        return b"+QUEUED\r\n"

    push = Command("r", "push", b"\x90", lambda _tag, fields: fields, [("rb:p:r:x:4", b"body")])
    async with scripted(tmp_path / "s", loading(5, then)) as url:
        store = StoreConnection(url)
        assert await store.store_and_run(push) == pack("done", 7)
        await store.close()
    async with scripted(tmp_path / "t", loading(5, lambda _: b"+PONG\r\n")) as url:
        store = StoreConnection(url)
        assert await store.command("PING") == b"PONG"
        await store.close()


async def test_a_store_that_goes_on_loading_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "LOADING_TIMEOUT_S", 0.05)
    async with scripted(tmp_path / "s", lambda _: b"-LOADING the dataset in memory\r\n") as url:
        store = StoreConnection(url)
        with pytest.raises(StoreUnavailable, match="goes on to answer: LOADING"):
            await store.command("PING")
        await store.close()


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (b"-READONLY You can't write against a read only replica.", StoreUnavailable),
        (b"-MISCONF Errors writing to the AOF file: No space left on device", StoreOutOfDisk),
        (b"-BUSY Redis is busy running a script", StoreUnavailable),
        (b"-ERR whatever", StoreFault),
    ],
)
async def test_error_replies_become_errors_of_the_contract(
    tmp_path: Path, reply: bytes, error: type[StoreFault]
) -> None:
    async with scripted(tmp_path / "s", lambda _: reply + b"\r\n") as url:
        store = StoreConnection(url)
        with pytest.raises(error) as raised:
            await store.command("PING")
        assert raised.type is error
        await store.close()
