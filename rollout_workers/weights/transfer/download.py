"""File of a manifest over http(s), in pieces: a connection that breaks is taken up where it broke, at the same source
or at another one that has the same file.

A near source sends the whole file over one connection. One that is slow to answer sends pieces over several, for there
latency and losses bound what one connection carries. The checksum runs along with the bytes.
"""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import structlog

from buffer_wire.connection.retry import Backoff
from rollout_buffer.v1 import weights_pb2
from rollout_workers.errors import WeightsInvalid, WeightsUnavailable
from rollout_workers.weights.files import CHUNK_BYTES, check_content
from rollout_workers.weights.transfer.client import WeightClient
from rollout_workers.weights.transfer.pieces import Pieces
from rollout_workers.weights.transfer.sources import Sources

DOUBT = {"Cache-Control": "no-cache"}
"""Header that asks a relay to check the file that it has, and to drop it if it is wrong."""

_BACKOFF = Backoff(first_s=0.1, ceiling_s=2.0)
_DOUBT_S = 5.0
MOST_SAID = 300
"""Characters of an error that are said: it quotes what a server sent."""
_log = structlog.get_logger()


class Download:
    """Download of one file to `target`."""

    def __init__(
        self, label: str, sources: Sources, file: weights_pb2.WeightFile, target: Path, client: WeightClient
    ) -> None:
        self._label = label
        self._sources = sources
        self._file = file
        self._target = target
        self._client = client
        self._writer: _Writer | None = None
        self._streams: dict[asyncio.Task[None], int] = {}
        """Streams that run, each with its piece."""
        self._single = False
        """True where one connection at a time has to do: a source gives no ranges, or sources are not to be mixed."""
        self._unmixed = False
        """True once parts of several sources made a wrong file: then a change of the source begins anew."""
        self._deadline_at = self._patience_s = self._came_at = 0.0
        self._wanted: Callable[[], bool] = lambda: True
        self.pieces = Pieces(file.size_bytes)
        self.received: dict[str, int] = {}
        """Bytes of the file that came from each source, by URL."""

    async def run(
        self, deadline_at: float, *, patience_s: float = 0.0, wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Fetch until complete and checked. May be called again after a failure, and goes on where it was.

        It gives up at `deadline_at`, on the monotonic clock, but not before `patience_s` without a byte; where the file
        is not `wanted` any more, as soon as no source gives it. Raises WeightsUnavailable then, WeightsInvalid for
        wrong content of the publisher, which is then deleted.
        """
        self._wanted = wanted
        self._deadline_at, self._patience_s, self._came_at = deadline_at, patience_s, time.monotonic()
        self._writer = _Writer(self._target, self.pieces)
        try:
            while not await self._fetched():
                self._start_over()
        except WeightsInvalid:
            self._target.unlink(missing_ok=True)
            self._start_over()
            raise
        finally:
            self._writer.close()

    async def _fetched(self) -> bool:
        """Fetch what is missing; False when others than the publisher have sent a wrong file."""
        try:
            await self._fetch()
            check_content(self._label, self._file, self.pieces.received, self.pieces.sha256)
        except WeightsInvalid as error:
            others = [url for url in self.received if not self._sources.is_publisher(url)]
            if not others:
                raise
            _log.warning("peers sent a wrong file", peers=sorted(others), error=str(error))
            await asyncio.gather(*(self._doubt(url) for url in others if self._sources.is_mirror(url)))
            if len(others) == 1:
                self._sources.ban(others[0])
            # Else nobody knows whose part was wrong: from now on the file is one source's alone, which shows it.
            self._unmixed = self._single = True
            return False
        return True

    # --- streams ----------------------------------------------------------------------------------------------

    async def _fetch(self) -> None:
        """Run one stream, which begins others where its source is worth them, until all bytes have come."""
        try:
            async with asyncio.TaskGroup() as group:
                self._begin(group)
        except ExceptionGroup as errors:
            # Whatever fails one stream for good fails them all.
            raise errors.exceptions[0] from None
        finally:
            for piece in self._streams.values():
                self.pieces.put_back(piece)
            self._streams.clear()

    def _begin(self, group: asyncio.TaskGroup) -> bool:
        """Begin a stream; False when there is no piece for it."""
        piece = self.pieces.take()
        if piece is not None:
            stream = group.create_task(self._stream(group))
            self._streams[stream] = piece
        return piece is not None

    async def _stream(self, group: asyncio.TaskGroup) -> None:
        me = asyncio.current_task()
        assert me is not None  # noqa: S101 - a coroutine that runs as a task
        piece: int | None = self._streams[me]
        while piece is not None:
            self._streams[me] = piece
            await self._finish(me, group)
            self.pieces.put_back(self._streams[me])
            piece = None if self._is_too_many() else self.pieces.take()
        del self._streams[me]

    def _is_too_many(self) -> bool:
        return self._single and len(self._streams) > 1

    async def _finish(self, me: asyncio.Task[None], group: asyncio.TaskGroup) -> None:
        """Fetch the rest of a stream's piece, from whoever gives it."""
        delays, furthest, why = _BACKOFF.delays(), 0, "there is no peer that has it"
        while self.pieces.missing(self._streams[me]) and not self._is_too_many():
            url = await self._sources.choose()
            if url is not None:
                try:
                    async with asyncio.timeout(None if self._patience_s else self._left()):
                        await self._attempt(url, me, group)
                except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                    why = f"{url}: {str(error)[:MOST_SAID] or type(error).__name__}"
                    self._sources.failed(url)
                else:
                    continue
                if self.pieces.received > furthest:
                    delays, furthest = _BACKOFF.delays(), self.pieces.received
                if self._left() > 0:
                    _log.warning("download resumes", at_byte=self.pieces.received, why=why)
                    continue
            wait = next(delays)
            if wait > self._left() or not self._wanted():
                received = f"{self.pieces.received} of {self._file.size_bytes} bytes received"
                raise WeightsUnavailable(self._label, self._sources.described, f"{why} ({received})")
            await asyncio.sleep(wait)

    def _left(self) -> float:
        return max(self._deadline_at, self._came_at + self._patience_s) - time.monotonic()

    # --- one request ------------------------------------------------------------------------------------------

    async def _attempt(self, url: str, me: asyncio.Task[None], group: asyncio.TaskGroup) -> None:
        if self._unmixed and self.received.keys() - {url}:
            self._start_over()
            self._streams[me] = self.pieces.take() or 0
        rates, before = self._client.rates, self.received.get(url, 0)
        start, stop = self.pieces.span(self._streams[me])
        alone = self._single or (len(self._streams) == 1 and rates.streams(url) == 1)
        to_end = alone or stop == self.pieces.size
        headers = {} if to_end and not start else {"Range": f"bytes={start}-{'' if to_end else stop - 1}"}
        failed, began = True, time.monotonic()
        rates.began(url)
        try:
            # A peer or a mirror must not send this worker to wherever it cannot reach itself.
            to_any = self._sources.is_publisher(url)
            async with self._client.get(url, headers, may_redirect=to_any) as response:
                answered = time.monotonic()
                rates.answered(url, answered - began)
                began = answered
                self._client.check(response)
                self._check_range(response, start, me)
                while len(self._streams) < rates.streams(url) and not self._single and self._begin(group):
                    pass
                self.received.setdefault(url, 0)
                await self._receive(url, response, me)
            failed = False
        finally:
            came = self.received.get(url, 0) - before
            rates.ended(url, received=max(came, 0), seconds=time.monotonic() - began, failed=failed)
        if self.pieces.missing(self._streams[me]) and not self._is_too_many():
            # Some servers end a cut-off body in order.
            raise aiohttp.ClientPayloadError("the body ended early")

    def _check_range(self, response: aiohttp.ClientResponse, start: int, me: asyncio.Task[None]) -> None:
        """Raise ClientPayloadError for another range than was asked for; the whole file may come in its place."""
        given = response.headers.get("Content-Range", "")
        if response.status == 206 and given.startswith(f"bytes {start}-"):
            return
        if response.status != 206 and not start:
            return
        self._single = True
        if len(self._streams) > 1:
            raise aiohttp.ClientPayloadError("the source gives no ranges")
        self._start_over()
        self._streams[me] = self.pieces.take() or 0
        if response.status == 206:
            raise aiohttp.ClientPayloadError("a range came that was not asked for")

    async def _receive(self, url: str, response: aiohttp.ClientResponse, me: asyncio.Task[None]) -> None:
        """Take a body, which may go on over the pieces that follow."""
        async for body in response.content.iter_chunked(CHUNK_BYTES):
            await self._client.took(len(body))
            chunk = body
            while chunk:
                room = self.pieces.missing(self._streams[me])
                if not room and not self._goes_on(me):
                    return
                part, chunk = chunk[:room], chunk[room:]
                await self._take(url, self._streams[me], part)

    def _goes_on(self, me: asyncio.Task[None]) -> bool:
        """Take the piece that follows; False when another stream has it."""
        piece = self._streams[me]
        if self.pieces.span(piece)[1] == self.pieces.size:
            raise WeightsInvalid(
                self._label, self._file.name, f"more than the manifest's {self._file.size_bytes} bytes come"
            )
        if not self.pieces.take_next(piece):
            return False
        self.pieces.put_back(piece)
        self._streams[me] = piece + 1
        return True

    async def _take(self, url: str, piece: int, part: bytes) -> None:
        if part and self._writer is not None:
            await asyncio.to_thread(self._writer.write, piece, part)
            self.received[url] = self.received.get(url, 0) + len(part)
            self._came_at = time.monotonic()
            self.pieces.grew()

    def _start_over(self) -> None:
        self.pieces.start_over()
        for piece in self._streams.values():
            self.pieces.put_back(piece)
        self.received.clear()

    async def _doubt(self, url: str) -> None:
        """Tell a mirror that its file is wrong, so that it fetches another."""
        with contextlib.suppress(aiohttp.ClientError, ConnectionError, TimeoutError):
            async with asyncio.timeout(_DOUBT_S), self._client.head(url, DOUBT):
                pass


class _Writer:
    """Writer of a file's pieces, one at a time; a thread that outlives its stream writes nothing after the close."""

    def __init__(self, path: Path, pieces: Pieces) -> None:
        self._pieces = pieces
        self._lock = threading.Lock()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)

    def write(self, piece: int, part: bytes) -> None:
        """Write what comes next of a piece. Blocking."""
        with self._lock:
            if self._descriptor >= 0:
                self._pieces.add(self._descriptor, piece, part)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            os.close(self._descriptor)
            self._descriptor = -1
