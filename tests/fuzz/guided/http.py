"""Exchange of bytes with a server of HTTP, and what must not be in its log meanwhile."""

import asyncio
import contextlib
import logging
from typing import Any

ANSWER_S = 5.0
"""A server that has a whole request answers it by then, or it hangs."""
PART_S, MORE_S = 0.05, 0.003
"""Times that are waited for an answer to what may be no whole request, and for more of one that has begun."""


async def exchanged(address: str, sent: bytes, *, whole: bool) -> bytes:
    """All that a server at host:port answers to what is sent over a connection of its own, which then ends.

    `whole`: a request that asks for the end of the connection, which the server has to come to.
    """
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    told = b""
    try:
        async with asyncio.timeout(ANSWER_S if whole else PART_S) as limit:
            with contextlib.suppress(ConnectionError):
                writer.write(sent)
                await writer.drain()
                while piece := await reader.read(1 << 16):
                    told += piece
                    if not whole:
                        limit.reschedule(asyncio.get_running_loop().time() + MORE_S)
    except TimeoutError:
        assert not whole, f"no end of the answer within {ANSWER_S:g} s: {told[:200]!r}"
    finally:
        writer.transport.abort()
    return told


def status_of(answer: bytes) -> int:
    """Status of the first answer; 0 where there is none."""
    return int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else 0


class Watched(logging.Handler):
    """Record of what servers of this process log as errors, and of what nobody has caught in the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(logging.ERROR)
        self._found: list[str] = []
        loop.set_exception_handler(self._uncaught)
        logging.getLogger().addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line of the log."""
        self._found.append(logging.Formatter().format(record))

    def _uncaught(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._found.append(f"{context.get('message')}: {context.get('exception')!r}")

    def check(self) -> None:
        """Raise AssertionError for what has come."""
        found, self._found = self._found, []
        assert not found, "\n".join(found)[:6_000]
