"""Connections to the admin page that bring no request."""

import asyncio
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
    """What comes until the connection ends."""
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
