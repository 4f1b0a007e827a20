"""A stream that ends while its client writes says what the server said."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from buffer_wire.connection.channel import client_options, server_options
from buffer_wire.connection.stream_end import StreamEnd
from buffer_wire.errors import PendingFull, RolloutBufferError
from buffer_wire.status import ServiceUnreachable, status_of
from tests.security.serving import serving

METHOD = "/a.Service/Take"
REFUSAL = PendingFull(3, limit=3)


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    """To a server that refuses every stream at its first message."""

    async def take(_requests: object, context: Any) -> None:
        await context.read()
        code, details, trailing = status_of(REFUSAL)
        await context.abort(code, details, trailing)

    methods = {"Take": grpc.stream_stream_rpc_method_handler(take)}
    async with (
        serving("a.Service", methods, server_options()) as address,
        grpc.aio.insecure_channel(address, options=client_options()) as channel,
    ):
        yield channel


async def ended(channel: grpc.aio.Channel) -> tuple[StreamEnd, grpc.StatusCode]:
    """The end of a stream that is written to until it breaks, and what gRPC says of it then."""
    call = channel.stream_stream(METHOD, None, None)(None, timeout=20)
    end = StreamEnd(call)
    try:
        while True:
            await call.write(b"message")
    except (grpc.RpcError, asyncio.InvalidStateError):
        return end, await call.code()


async def test_a_refusal_is_told_however_the_write_met_it(channel: grpc.aio.Channel) -> None:
    met = set()
    for _ in range(200):
        end, code = await ended(channel)
        met.add(code)
        error = await end.error()
        assert isinstance(error, PendingFull)
        assert (str(error), error.attributes) == (str(REFUSAL), REFUSAL.attributes)
    assert grpc.StatusCode.INTERNAL in met, "gRPC keeps the status itself by now: StreamEnd can go"


class Ended:
    """A call that has ended; its callbacks are told at once, or never."""

    def __init__(self, code: grpc.StatusCode, details: str, *, tells: bool) -> None:
        self._code, self._details, self._tells = code, details, tells

    def add_done_callback(self, callback: "Callable[[Ended], None]") -> None:
        if self._tells:
            callback(self)

    async def code(self) -> grpc.StatusCode:
        return self._code

    async def details(self) -> str:
        return self._details

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        (grpc.StatusCode.INTERNAL, "Internal error from Core", ServiceUnreachable),
        (grpc.StatusCode.INTERNAL, "a proxy's own", RolloutBufferError),
        (grpc.StatusCode.UNAVAILABLE, "Connection reset", ServiceUnreachable),
    ],
)
async def test_a_write_that_failed_without_any_status_may_be_repeated(
    code: grpc.StatusCode, details: str, kind: type[RolloutBufferError], tells: bool
) -> None:
    error = await StreamEnd(Ended(code, details, tells=tells)).error()  # type: ignore[arg-type]
    assert error is not None
    assert type(error) is kind
    assert error.attributes["status"] == code.name


@pytest.mark.parametrize("tells", [True, False])
async def test_an_end_in_order_is_no_error(tells: bool) -> None:
    end = StreamEnd(Ended(grpc.StatusCode.OK, "", tells=tells))  # type: ignore[arg-type]
    assert await end.error() is None
