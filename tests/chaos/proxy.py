"""A TCP proxy in front of a server, whose connections a nemesis cuts, slows down and loses."""

import asyncio
import contextlib
import random
from dataclasses import dataclass, field

CHUNK = 1 << 16


@dataclass(frozen=True)
class Mood:
    """Way in which bytes pass. `delay_s` holds each chunk back. `losses` is the chance that a chunk ends its
    connection. `swallows` lets nothing through and ends nothing; `refuses` ends what comes.
    """

    delay_s: float = 0.0
    losses: float = 0.0
    swallows: bool = False
    refuses: bool = False


FINE = Mood()


@dataclass
class Proxy:
    """Leads from a port of its own to `to`, a host:port that may change when the server is started again."""

    to: str
    rng: random.Random
    mood: Mood = FINE
    port: int = 0
    _server: asyncio.Server | None = None
    _through: set[asyncio.StreamWriter] = field(default_factory=set)
    _passes: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def host(self) -> str:
        """host:port of this end."""
        return f"127.0.0.1:{self.port}"

    async def open(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._carry_both, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        self.be(FINE)

    def be(self, mood: Mood) -> None:
        """Change the mood; one that refuses ends what goes through."""
        self.mood = mood
        if mood.swallows:
            self._passes.clear()
        else:
            self._passes.set()
        if mood.refuses:
            self.cut()

    def cut(self) -> None:
        """End every connection."""
        for writer in list(self._through):
            writer.transport.abort()

    async def close(self) -> None:
        """End everything."""
        if self._server is not None:
            self._server.close()
            self.be(FINE)
            self.cut()
            await asyncio.sleep(0)

    async def _carry_both(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.mood.refuses:
            writer.transport.abort()
            return
        host, _, port = self.to.rpartition(":")
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, far_writer}
        self._through |= ends
        ways = [
            asyncio.create_task(self._carry(reader, far_writer)),
            asyncio.create_task(self._carry(far_reader, writer)),
        ]
        try:
            with contextlib.suppress(asyncio.CancelledError):  # The end of the bout.
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            for end in ends:
                end.transport.abort()
            self._through -= ends

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(CHUNK):
                await self._passes.wait()
                mood = self.mood
                if mood.delay_s:
                    await asyncio.sleep(mood.delay_s)
                if mood.losses and self.rng.random() < mood.losses:
                    return
                target.write(data)
                await target.drain()
            # What was sent before the end arrives before it.
            await target.drain()
