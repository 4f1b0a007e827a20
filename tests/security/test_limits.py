"""What one peer can make a server hold: header fields, connections."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from buffer_wire.channel import MAX_METADATA_BYTES, client_options, server_options


@asynccontextmanager
async def serving(max_connections: int) -> AsyncIterator[str]:
    async def answer(_request: bytes, _context: object) -> bytes:
        return b"ok"

    server = grpc.aio.server(options=server_options(max_connections=max_connections))
    handlers = {"Call": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def called(channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...] = ()) -> grpc.StatusCode:
    try:
        await channel.unary_unary("/t.T/Call", None, None)(b"", timeout=10, metadata=metadata)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_header_fields_are_bounded() -> None:
    async with serving(16) as address, grpc.aio.insecure_channel(address, options=client_options()) as channel:
        assert await called(channel, (("x", "y" * (MAX_METADATA_BYTES - 1_024)),)) is grpc.StatusCode.OK
        assert await called(channel, (("x", "y" * MAX_METADATA_BYTES),)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await called(channel) is grpc.StatusCode.OK, "the connection goes on"


async def test_connections_are_bounded() -> None:
    async with serving(2) as address:
        channels = [grpc.aio.insecure_channel(address, options=client_options()) for _ in range(3)]
        codes = [await called(channel) for channel in channels]
        assert codes == [grpc.StatusCode.OK, grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE]
        for channel in channels:
            await channel.close(None)
