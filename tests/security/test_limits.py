"""Tests of what one peer can make a server hold and do: header fields, connections, a token's RPCs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry

from buffer_service.observability.metrics import RpcMetrics
from buffer_service.rpc.interceptor import Guard
from buffer_service.security.gate import Gate
from buffer_service.security.roles import Role
from buffer_service.security.shares import Shares
from buffer_service.security.token_file import TokenFile
from buffer_wire.connection.channel import MAX_METADATA_BYTES, client_options, server_options
from buffer_wire.connection.retry import rpc_error
from tests.security.guarded import add_token
from tests.security.serving import serving


@asynccontextmanager
async def answering(max_connections: int) -> AsyncIterator[str]:
    async def answer(_request: bytes, _context: object) -> bytes:
        return b"ok"

    methods = {"Call": grpc.unary_unary_rpc_method_handler(answer)}
    async with serving("t.T", methods, server_options(max_connections=max_connections)) as address:
        yield address


async def called(channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...] = ()) -> grpc.StatusCode:
    try:
        await channel.unary_unary("/t.T/Call", None, None)(b"", timeout=10, metadata=metadata)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_header_fields_are_bounded() -> None:
    async with answering(16) as address, grpc.aio.insecure_channel(address, options=client_options()) as channel:
        assert await called(channel, (("x", "y" * (MAX_METADATA_BYTES - 1_024)),)) is grpc.StatusCode.OK
        assert await called(channel, (("x", "y" * MAX_METADATA_BYTES),)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await called(channel) is grpc.StatusCode.OK, "the connection goes on"


async def test_connections_are_bounded() -> None:
    async with answering(2) as address:
        channels = [grpc.aio.insecure_channel(address, options=client_options()) for _ in range(3)]
        codes = [await called(channel) for channel in channels]
        assert codes == [grpc.StatusCode.OK, grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE]
        for channel in channels:
            await channel.close(None)


class Clock:
    """Moves when it is told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def guarded(tokens: Path, shares: Shares) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """A server whose ListRuns lasts until the event."""
    release = asyncio.Event()

    async def answer(_request: bytes, _context: object) -> bytes:
        await asyncio.wait_for(release.wait(), 30)
        return b"ok"

    server = grpc.aio.server(interceptors=[Guard(RpcMetrics(CollectorRegistry()), Gate(TokenFile(tokens)), shares)])
    handlers = {"ListRuns": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("rollout_buffer.v1.RunService", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", release
    finally:
        await server.stop(0)


async def list_runs(channel: grpc.aio.Channel, token: str) -> str:
    """The answer, or why there is none."""
    call = channel.unary_unary("/rollout_buffer.v1.RunService/ListRuns", None, None)
    try:
        return bytes(await call(b"", timeout=20, metadata=(("authorization", f"Bearer {token}"),))).decode()
    except grpc.RpcError as error:
        refusal = rpc_error(error)
        assert refusal.retryable, "clients come again by themselves"
        return refusal.message


async def test_a_token_that_calls_too_often_is_told_so_and_others_are_served(tmp_path: Path) -> None:
    greedy, other = (add_token(tmp_path / "tokens", name, Role.READER, "*") for name in ("greedy", "other"))
    clock = Clock()
    async with (
        guarded(tmp_path / "tokens", Shares(0, 2, clock)) as (address, release),
        grpc.aio.insecure_channel(address) as channel,
    ):
        release.set()
        answers = [await list_runs(channel, greedy) for _ in range(5)]
        assert answers[:4] == ["ok"] * 4
        assert "token 'greedy' calls more often than 2 times a second (max_token_rpcs_per_s)" in answers[4]
        assert await list_runs(channel, other) == "ok"
        clock.now += 0.5
        assert await list_runs(channel, greedy) == "ok"


async def test_a_token_holds_so_many_rpcs_at_once_and_others_are_served(tmp_path: Path) -> None:
    greedy, other = (add_token(tmp_path / "tokens", name, Role.READER, "*") for name in ("greedy", "other"))
    async with (
        guarded(tmp_path / "tokens", Shares(2, 0)) as (address, release),
        grpc.aio.insecure_channel(address) as channel,
    ):
        calls = [asyncio.ensure_future(list_runs(channel, greedy)) for _ in range(3)]
        done, waiting = await asyncio.wait(calls, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        assert ["max_token_rpcs" in call.result() for call in done] == [True]
        calls.append(asyncio.ensure_future(list_runs(channel, other)))
        release.set()
        assert set(await asyncio.gather(*waiting, calls[-1])) == {"ok"}
        assert await list_runs(channel, greedy) == "ok"
