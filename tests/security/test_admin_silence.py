"""Connections to the admin page that bring no request, and requests that break off or break the rules."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator

import pytest
from starlette.responses import PlainTextResponse

from buffer_service.admin import server as server_module
from buffer_service.admin.server import AdminServer

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(server_module, "REQUEST_S", 0.2)
    server = AdminServer(PlainTextResponse("page"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve_on(listener))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await asyncio.wait_for(serving, 20)


async def rest(reader: asyncio.StreamReader) -> bytes:
    """Return what comes until the connection ends."""
    return await asyncio.wait_for(reader.read(), 10)


@pytest.mark.parametrize("begun", [b"", REQUEST])
async def test_a_connection_without_a_whole_request_is_closed(port: int, begun: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(begun)
    assert await rest(reader) == b""
    writer.close()


async def test_so_is_one_whose_next_request_does_not_end(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    # A second one that has begun stops uvicorn's own timer.
    writer.write(REQUEST + b"\r\n" + REQUEST)
    assert (await rest(reader)).endswith(b"page")
    writer.close()


async def test_requests_on_one_connection_are_answered_as_long_as_they_come(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    deadline = asyncio.get_running_loop().time() + 5 * 0.2
    while asyncio.get_running_loop().time() < deadline:
        writer.write(REQUEST + b"\r\n")
        assert await asyncio.wait_for(reader.readuntil(b"page"), 10)
    writer.close()


# Its head is in order, so that it is answered; how far the answer is when the rest comes differs.
BROKEN_BODY = b" / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(("method", "answered_first"), [(b"POST", False), (b"HEAD", False), (b"POST", True)])
async def test_a_body_that_breaks_the_rules_ends_its_connection_and_is_no_error(
    port: int, caplog: pytest.LogCaptureFixture, method: bytes, answered_first: bool
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    if answered_first:
        writer.write(method + BROKEN_BODY)
        assert await asyncio.wait_for(reader.readuntil(b"page"), 10)
        writer.write(b"no size\r\n")
    else:
        writer.write(method + BROKEN_BODY + b"no size\r\n")
    answer = await rest(reader) if not answered_first else await ended(reader)
    assert answered_first or answer.startswith(b"HTTP/1.1 400 ")
    writer.close()
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


async def ended(reader: asyncio.StreamReader) -> bytes:
    """Return what comes until the connection is reset or ends."""
    try:
        return await rest(reader)
    except ConnectionResetError:
        return b""
