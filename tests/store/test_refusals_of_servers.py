"""Failures of a server, and its refusals, as errors of the contract, against a scripted server."""

import asyncio
from pathlib import Path

import pytest

from buffer_service.commands.replies import pack
from buffer_service.domain.command import Command
from buffer_service.store.transport import exchange as exchange_module
from buffer_service.store.transport.connection import StoreConnection
from buffer_wire.errors import StoreFault, StoreOutOfDisk, StoreUnavailable
from tests.support.scripted_store import Answer, bulk, scripted


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
