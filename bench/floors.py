"""The floors: what moving these bytes must cost at least, on the same machine in the same run.

Raw gRPC: a grpc.aio server that takes bytes on a bidirectional stream and acknowledges each message, and one that
streams bytes out; the server's CPU counts. Raw store: SET, GET and UNLINK of every group by a client that does
nothing else (one socket, no parsing but of lengths); the store's and the client's CPU count, since a service must do
both. Messages are as large as ours, and different from one another as ours are: one buffer of zeros sent over and over
stays in the processor's caches and would make the floor 30% too low.
"""

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from itertools import cycle
from typing import Any

from bench.roles import Handler

_METHOD_PUSH, _METHOD_PULL = "/floor.Floor/Push", "/floor.Floor/Pull"


_POOL_BYTES = 32 << 20


def _blobs(size: int) -> Iterator[bytes]:
    """Random messages of `size` bytes, for ever; at least 32 MB go by before one comes again."""
    return cycle([os.urandom(size) for _ in range(max(2, _POOL_BYTES // size))])


def grpc_server() -> dict[str, Handler]:
    """The raw server; command `port` tells where it listens."""
    import grpc
    import uvloop

    from buffer_wire.connection.channel import server_options

    ready = threading.Event()
    port = 0
    blobs: dict[int, Iterator[bytes]] = {}

    async def push(requests: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
        async for _message in requests:
            yield b"ok"

    async def pull(request: bytes, _: object) -> AsyncIterator[bytes]:
        size, count = (int(n) for n in request.split())
        for _message in range(count):
            yield next(blobs[size])

    def prepare(size: int) -> None:
        blobs[size] = _blobs(size)

    async def serve() -> None:
        nonlocal port
        server = grpc.aio.server(options=server_options())
        handlers = {
            "Push": grpc.stream_stream_rpc_method_handler(push),
            "Pull": grpc.unary_stream_rpc_method_handler(pull),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("floor.Floor", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        ready.set()
        await server.wait_for_termination()

    threading.Thread(target=lambda: uvloop.run(serve()), daemon=True).start()
    ready.wait(30)
    return {"port": lambda: port, "prepare": prepare}


def grpc_client(port: int) -> dict[str, Handler]:
    """Commands `push` and `pull` of `count` messages of `size` bytes."""
    import grpc

    from buffer_wire.connection.channel import client_options

    blobs: dict[int, Iterator[bytes]] = {}

    def prepare(size: int) -> None:
        blobs[size] = _blobs(size)

    async def push(size: int, count: int) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=client_options()) as channel:
            call: Any = channel.stream_stream(_METHOD_PUSH)()  # type: ignore[call-arg]  # raw bytes

            async def send() -> None:
                for _ in range(count):
                    await call.write(next(blobs[size]))
                await call.done_writing()

            async with asyncio.TaskGroup() as group:
                group.create_task(send())
                async for _ack in call:
                    pass

    async def pull(size: int, count: int) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=client_options()) as channel:
            method: Any = channel.unary_stream(_METHOD_PULL)  # type: ignore[call-arg]  # raw bytes
            async for _message in method(b"%d %d" % (size, count)):
                pass

    return {
        "prepare": prepare,
        "push": lambda size, count: asyncio.run(push(size, count)),
        "pull": lambda size, count: asyncio.run(pull(size, count)),
    }


def store_client(unix_socket: str) -> dict[str, Handler]:
    """Command `move`: SET, GET and UNLINK `count` values of `size` bytes, a few at a time."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(unix_socket)
    window = 8

    def read_exactly(view: memoryview) -> None:
        while view:
            got = connection.recv_into(view)
            if not got:
                raise ConnectionError("the store closed the connection")
            view = view[got:]

    blobs: dict[int, Iterator[bytes]] = {}

    def prepare(size: int) -> None:
        blobs[size] = _blobs(size)

    def move(size: int, count: int) -> None:
        reply = memoryview(bytearray(size + 64))
        for first in range(0, count, window):
            keys = [b"floor:%d" % (first + i) for i in range(min(window, count - first))]
            for key in keys:
                head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, size)
                if connection.sendmsg([head, next(blobs[size]), b"\r\n"]) < len(head) + size + 2:
                    raise ConnectionError("a blocking socket took only a part of the message")
            read_exactly(reply[: 5 * len(keys)])
            for key in keys:
                connection.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key))
                read_exactly(reply[: len(b"$%d\r\n" % size) + size + 2])
            parts = b"".join(b"$%d\r\n%b\r\n" % (len(key), key) for key in keys)
            connection.sendall(b"*%d\r\n$6\r\nUNLINK\r\n%b" % (len(keys) + 1, parts))
            read_exactly(reply[: len(b":%d\r\n" % len(keys))])

    return {"prepare": prepare, "move": move}
