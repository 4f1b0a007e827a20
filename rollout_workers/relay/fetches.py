"""Files that a relay fetches: each once, however many ask for it, and readable while it comes.

Invariant: a fetch that nobody gets bytes from ends those who wait, so that they ask elsewhere. What it had stays until
somebody asks again, and then goes on where it was; room for other files is made of it first.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import BinaryIO

import aiohttp
import structlog

from buffer_wire.weights.door import path_of
from rollout_buffer.v1 import weights_pb2
from rollout_workers.errors import WeightsInvalid, WeightsUnavailable
from rollout_workers.relay.disk import Disk
from rollout_workers.weights.transfer.client import WeightClient
from rollout_workers.weights.transfer.download import MOST_SAID, Download
from rollout_workers.weights.transfer.rates import origin
from rollout_workers.weights.transfer.sources import Sources, file_url

_CHUNK_BYTES = 256 << 10
_log = structlog.get_logger()


class NotThere(Exception):
    """No upstream has the file."""


class NoUpstream(Exception):
    """No upstream answers, or none gives the right content."""


class NoRoom(Exception):
    """The file is larger than what there is room for."""


class Fetch:
    """Fetch of one file of `size` bytes."""

    def __init__(self, digest: str, size: int, download: Download, path: Path) -> None:
        self.digest = digest
        self.size = size
        self.task: asyncio.Task[None] | None = None
        self.download = download
        self._path = path

    @property
    def running(self) -> bool:
        """True until it ends, well or not."""
        return self.task is not None and not self.task.done()

    def open(self) -> BinaryIO:
        """Open what is there, for `read`, before anything is awaited: a fetch that ends takes the file to its place."""
        return self._path.open("rb")

    async def read(self, file: BinaryIO, start: int, stop: int) -> AsyncIterator[bytes]:
        """Chunks of the bytes [start, stop) as they come. Raises EOFError when the fetch fails, or begins anew."""
        pieces = self.download.pieces
        beginning = pieces.beginning
        while start < stop:
            ready = min(await self._until(start), stop - start, _CHUNK_BYTES)
            chunk = await asyncio.to_thread(os.pread, file.fileno(), ready, start) if ready else b""
            if not chunk or pieces.beginning != beginning:
                raise EOFError
            yield chunk
            start += len(chunk)

    async def _until(self, start: int) -> int:
        """Wait for the byte at `start`; returns how many are there from it on, 0 when the fetch has failed."""
        ready = self.download.pieces.ready(start)
        if ready or self.task is None:
            return ready
        waiting = asyncio.ensure_future(self.download.pieces.until(start))
        try:
            await asyncio.wait({waiting, self.task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        return self.download.pieces.ready(start)


class Fetches:
    """Fetches of a relay from its upstreams to its disk."""

    def __init__(self, upstreams: Sequence[str], disk: Disk, client: WeightClient, *, patience_s: float) -> None:
        self._upstreams = upstreams
        self._disk = disk
        self._client = client
        self._patience_s = patience_s
        self._begun: dict[str, Fetch] = {}
        self._asking: dict[str, asyncio.Task[Fetch]] = {}
        self.completed = self.failed = 0

    @property
    def running(self) -> int:
        """Number of fetches under way."""
        return sum(fetch.running for fetch in self._begun.values())

    async def of(self, digest: str) -> Fetch:
        """The fetch of a file, begun if need be. Raises NotThere, NoUpstream, NoRoom."""
        fetch = self._begun.get(digest)
        if fetch is not None:
            if not fetch.running:
                fetch.task = asyncio.ensure_future(self._run(fetch))
            return fetch
        asking = self._asking.get(digest)
        if asking is None:
            asking = self._asking[digest] = asyncio.ensure_future(self._begin(digest))
            asking.add_done_callback(lambda _: self._asking.pop(digest, None))
        return await asyncio.shield(asking)

    async def close(self) -> None:
        """End all fetches."""
        tasks = [*self._asking.values(), *(fetch.task for fetch in self._begun.values() if fetch.task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _begin(self, digest: str) -> Fetch:
        size = await self._size(digest)
        path = self._disk.reserve(digest, size)
        for stale in [each for each in self._begun.values() if not each.running]:
            if path is not None:
                break
            self._forget(stale)
            path = self._disk.reserve(digest, size)
        if path is None:
            raise NoRoom(f"{size} bytes")
        sha256 = bytes.fromhex(digest)
        sources = Sources(digest, sha256, None, _no_peers, rates=self._client.rates, mirrors=self._upstreams)
        file = weights_pb2.WeightFile(name=digest, size_bytes=size, sha256=sha256)
        path.touch()
        fetch = Fetch(digest, size, Download("relay", sources, file, path, self._client), path)
        self._begun[digest] = fetch
        fetch.task = asyncio.ensure_future(self._run(fetch))
        return fetch

    async def _size(self, digest: str) -> int:
        """Size that the first upstream to answer gives. Raises NotThere when all say that there is no such file."""
        why, missing = "", 0
        good, failed = self._client.rates.order(self._upstreams)
        for base in [*good, *failed]:
            url = file_url(base, path_of(bytes.fromhex(digest)))
            try:
                async with AsyncExitStack() as stack:
                    await stack.enter_async_context(asyncio.timeout(self._patience_s))
                    response = await stack.enter_async_context(self._client.head(url, {}))
                    if response.status == 404:
                        missing += 1
                        continue
                    self._client.check(response)
                    return int(response.headers["Content-Length"])
            except (aiohttp.ClientError, ConnectionError, TimeoutError, KeyError, ValueError) as error:
                why = f"{base}: {error!r}"[:MOST_SAID]
        if missing == len(self._upstreams):
            raise NotThere
        raise NoUpstream(why)

    async def _run(self, fetch: Fetch) -> None:
        """Fetch to the end. What it has raised is in the log; those who wait see it by `Fetch.until`."""
        began, before = time.monotonic(), fetch.download.pieces.received
        _log.info("fetch begins", file=fetch.digest, bytes=fetch.size, at_byte=before)
        try:
            await fetch.download.run(began, patience_s=self._patience_s)
            self._disk.keep(fetch.digest)
        except WeightsUnavailable as error:
            self.failed += 1
            _log.warning("fetch fails", file=fetch.digest, error=str(error))
        except (WeightsInvalid, OSError) as error:
            self.failed += 1
            _log.error("fetch fails", file=fetch.digest, error=str(error))
            self._forget(fetch)
        else:
            self.completed += 1
            del self._begun[fetch.digest]
            seconds = time.monotonic() - began
            sources = sorted({origin(url) for url in fetch.download.received})
            rate = f"{(fetch.size - before) / 1e6 / max(seconds, 1e-6):.1f} MB/s"
            _log.info("fetched", file=fetch.digest, bytes=fetch.size, came_from=sources, rate=rate)

    def _forget(self, fetch: Fetch) -> None:
        self._disk.drop(fetch.digest)
        self._begun.pop(fetch.digest, None)


async def _no_peers() -> Sequence[str]:
    return ()
