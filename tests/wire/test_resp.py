"""The protocol of the store as the asyncio connection speaks it, against a scripted server."""

import asyncio
import contextlib
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest

from buffer_wire.resp.encoding import encode
from buffer_wire.resp.errors import ReplyError
from buffer_wire.resp.protocol import READ_BYTES, RespConnection
from tests.security.certificates import Authority, Certificate
from tests.support.scripted_store import scripted


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


def accept_and_read_to_the_end(listening: socket.socket, certificate: Certificate) -> None:
    """Greet a client by TLS, answer nothing more, and read until it ends the connection."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate.cert, certificate.key)
    accepted, _ = listening.accept()
    accepted.settimeout(10)
    greeted = context.wrap_socket(accepted, server_side=True)
    with socket.socket(fileno=greeted.detach()) as raw, contextlib.suppress(ConnectionResetError):
        raw.settimeout(10)
        while raw.recv(1 << 16):
            pass


async def test_a_connection_by_tls_that_was_left_twice_ends_at_once_when_it_is_aborted(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = asyncio.create_task(
            asyncio.to_thread(accept_and_read_to_the_end, listening, authority.issue("server"))
        )
        context = ssl.create_default_context(cafile=authority.cert)
        _, opened = await asyncio.get_running_loop().create_connection(
            RespConnection, *listening.getsockname(), ssl=context
        )
        # Left as the one over which something went wrong, and again as one that the next way does not use.
        opened.finish()
        opened.finish()
        opened.abort("closed by this side")
        assert opened.lost == "closed by this side"
        await server
