"""The proxy ends calls that it breaks, also those whose reply is just being written."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from buffer_conformance.proxy import AWAY, Proxy
from buffer_conformance.record import Record

PATH = "/some.Service/Method"
REPLY = bytes(8 << 20)
"""More than HTTP/2 lets a sender send before somebody reads."""
ENDS_S = 20.0


class LargeReplies(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # not generic when it runs
    """Answers any call with replies without end."""

    def service(self, _details: object) -> grpc.RpcMethodHandler:  # type: ignore[type-arg]
        return grpc.stream_stream_rpc_method_handler(self._answer)

    async def _answer(self, _requests: object, _context: object) -> AsyncIterator[bytes]:
        while True:
            yield REPLY


@pytest.fixture
async def service() -> AsyncIterator[str]:
    server = grpc.aio.server(options=[("grpc.max_send_message_length", -1)])
    server.add_generic_rpc_handlers((LargeReplies(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


async def replied(record: Record) -> None:
    """Wait until the proxy has a reply of the first call in hand."""
    while not record.exchanges or not record.exchanges[0].replies:  # noqa: ASYNC110 - a record tells nobody
        await asyncio.sleep(0.01)


async def read_all(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
        pass


async def test_a_call_whose_reply_is_being_written_ends_when_the_service_is_away(service: str) -> None:
    record = Record()
    async with (
        Proxy(service, record) as proxy,
        grpc.aio.insecure_channel(proxy.address, [("grpc.max_receive_message_length", -1)]) as channel,
    ):
        rpc: Any = channel.stream_stream(PATH, None, None)
        call = rpc()
        await call.write(b"request")
        await asyncio.wait_for(replied(record), ENDS_S)
        # The first reply is being written, since nobody reads it yet.
        away = asyncio.create_task(proxy.away(1.0))
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await asyncio.wait_for(read_all(call), ENDS_S)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        await away
    assert [exchange.fault for exchange in record.exchanges] == [AWAY]
