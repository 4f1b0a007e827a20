"""TCP balancer before replicas: it picks one for each connection, and no more, as a Service of Kubernetes does."""

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Self

Pick = Callable[[Sequence[str]], str]
"""Picks one of the addresses, host:port, for a connection that comes."""


class Balancer:
    """Open as a context; carries connections to `address` in a thread of its own.

    `backends` may be replaced while it runs; connections that are up stay where they are. `pick` is by default
    kube-proxy's: at random.
    """

    def __init__(self, backends: Sequence[str], pick: Pick = random.choice) -> None:
        self.backends = list(backends)
        self.address = ""
        self.accepted: Counter[str] = Counter()
        """Connections that came, by the address that they were led to."""
        self.open: Counter[str] = Counter()
        """Those of them that are up."""
        self._pick = pick
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="balancer", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._up.wait()
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._carry, "127.0.0.1", 0, backlog=4_096)
        host, port = server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        self._up.set()
        await self._stop.wait()
        server.close()
        # The connections end with the loop.

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        backend = self._pick(self.backends)
        self.accepted[backend] += 1
        self.open[backend] += 1
        host, _, port = backend.rpartition(":")
        writers = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            writers.append(far_writer)
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self.open[backend] -= 1
            for each in writers:
                each.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Carry one direction until its source ends, which ends the other direction too."""
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()
