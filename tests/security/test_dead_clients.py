"""A client that says nothing any more, and whose host never closed its connection, gives its stream slot back."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry

from buffer_service.observability.metrics import RpcMetrics
from buffer_service.rpc.flow.budget import StreamSlots
from buffer_service.rpc.interceptor import Guard
from buffer_service.security.gate import Gate, caller
from buffer_service.security.shares import Shares
from buffer_wire.connection.channel import client_options, server_options
from buffer_wire.connection.stream_end import StreamEnd
from buffer_wire.errors import NotReady
from tests.security.serving import serving
from tests.support.mortal import mortal

KEEPALIVE_S = 0.5
SOON_S = 20.0
METHOD = "/rollout_buffer.v1.GroupService/PushGroups"

CLIENT = f"""
import sys, time
import grpc
from buffer_wire.connection.channel import client_options

def sent():
    yield b"hello"
    time.sleep(600)

with grpc.insecure_channel(sys.argv[1], client_options()) as channel:
    for reply in channel.stream_stream("{METHOD}")(sent()):
        print("open", flush=True)
        {{after}}
"""


@asynccontextmanager
async def one_slot() -> AsyncIterator[str]:
    """A server with one slot; a stream is answered as long as its client sends."""
    slots = StreamSlots(1)

    async def push(_requests: object, context: Any) -> None:
        with slots.slot(caller().token_id):
            while await context.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
                await context.write(b"ok")

    guard = Guard(RpcMetrics(CollectorRegistry()), Gate(None), Shares(0, 0))
    methods = {"PushGroups": grpc.stream_stream_rpc_method_handler(push)}
    options = server_options(keepalive_s=KEEPALIVE_S)
    async with serving("rollout_buffer.v1.GroupService", methods, options, [guard]) as address:
        yield address


@asynccontextmanager
async def client(address: str, after: str = "") -> AsyncIterator[asyncio.subprocess.Process]:
    """A process with an open stream, which does `after` once it is open."""
    program = CLIENT.format(after=after)
    process = await asyncio.create_subprocess_exec(
        *mortal([sys.executable, "-c", program, address]), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), SOON_S) == b"open\n"
        yield process
    finally:
        process.kill()
        await process.wait()


async def is_served(channel: grpc.aio.Channel) -> bool:
    """Tell whether there is a slot for a stream."""
    call = channel.stream_stream(METHOD, None, None)(None, timeout=SOON_S)
    end = StreamEnd(call)
    try:
        await call.write(b"hello")
        reply = await call.read()
        await call.done_writing()
    except grpc.RpcError:
        if not isinstance(await end.error(), NotReady):
            raise
        return False
    return bool(reply == b"ok")


async def test_a_stopped_client_loses_its_slot_to_the_next() -> None:
    async with (
        one_slot() as address,
        client(address) as process,
        grpc.aio.insecure_channel(address, options=client_options()) as channel,
    ):
        assert not await is_served(channel), "the first one has the slot"
        process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(SOON_S):
            while not await is_served(channel):  # noqa: ASYNC110 - the server tells nobody that a slot is free
                await asyncio.sleep(0.1)


async def test_a_client_that_computes_keeps_its_slot() -> None:
    """One that holds Python's lock for longer than an answer to a ping may take: pings are answered without it."""
    async with (
        one_slot() as address,
        client(address, after="x = 3**3_000_000; print('computed', flush=True)") as process,
        grpc.aio.insecure_channel(address, options=client_options()) as channel,
    ):
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), SOON_S) == b"computed\n"
        assert not await is_served(channel)
