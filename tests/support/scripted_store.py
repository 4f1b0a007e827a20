"""A store's server that answers as a test tells it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

Answer = Callable[[list[bytes]], bytes]


def bulk(body: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(body), body)


INTRODUCTION = {
    b"INFO server": bulk(b"# Server\r\nrun_id:abc\r\n"),
    b"INFO replication": bulk(b"role:master\r\nmaster_replid:def\r\n"),
    b"INFO memory": bulk(b"maxmemory_policy:noeviction\r\n"),
    b"INFO persistence": bulk(b"aof_enabled:0\r\n"),
    b"ROLE": b"*3\r\n$6\r\nmaster\r\n:0\r\n*0\r\n",
}


@contextlib.asynccontextmanager
async def scripted(path: Path, answer: Answer, *, portion: int = 1 << 20) -> AsyncIterator[str]:
    """A server that introduces itself and answers every other command as told, in writes of `portion` bytes."""

    serving: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                count = int((await reader.readuntil(b"\r\n"))[1:])
                command = []
                for _ in range(count):
                    size = int((await reader.readuntil(b"\r\n"))[1:])
                    command.append((await reader.readexactly(size + 2))[:-2])
                reply = INTRODUCTION.get(b" ".join(command)) or answer(command)
                for first in range(0, len(reply), portion):
                    writer.write(reply[first : first + portion])
                    await writer.drain()
                    await asyncio.sleep(0)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.create_task(serve(reader, writer)))

    server = await asyncio.start_unix_server(accept, path)
    try:
        yield f"unix://{path}"
    finally:
        server.close()
        # Each ends when its client has closed.
        await asyncio.gather(*serving)
        await server.wait_closed()
