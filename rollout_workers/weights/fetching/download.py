"""Files of a manifest over http(s), in ranges: a connection that breaks is taken up where it broke, at the same source
or at another one that has the same file.

The checksum runs along with the bytes, so that nothing is read twice.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import structlog

from buffer_wire.connection.retry import Backoff
from rollout_buffer.v1 import weights_pb2
from rollout_workers.errors import WeightsInvalid, WeightsUnavailable
from rollout_workers.weights.fetching.files import CHUNK_BYTES, check_content
from rollout_workers.weights.fetching.sources import Sources

_BACKOFF = Backoff(first_s=0.1, ceiling_s=2.0)
_log = structlog.get_logger()


class Download:
    """Download of one file."""

    def __init__(
        self, label: str, sources: Sources, file: weights_pb2.WeightFile, target: Path, *, stall_s: float
    ) -> None:
        self._label = label
        self._sources = sources
        self._file = file
        self._target = target
        self._stall = aiohttp.ClientTimeout(total=None, sock_connect=stall_s, sock_read=stall_s)
        self._contributors: set[str] = set()
        self._received = 0
        self._sha256 = hashlib.sha256()

    async def run(self, session: aiohttp.ClientSession, deadline_at: float) -> None:
        """Fetch until complete and checked; `deadline_at` on the monotonic clock.

        Raises WeightsUnavailable at the deadline, WeightsInvalid for wrong content of the publisher, which is then
        deleted.
        """
        while True:
            try:
                await self._fetch(session, deadline_at)
                check_content(self._label, self._file, self._received, self._sha256.digest())
            except WeightsInvalid as error:
                self._target.unlink(missing_ok=True)
                peers = {url for url in self._contributors if self._sources.is_peer(url)}
                if not peers:
                    raise
                _log.warning("peers sent a wrong file", peers=sorted(peers), error=str(error))
                for url in peers:
                    self._sources.ban(url)
                self._start_over()
            else:
                return

    async def _fetch(self, session: aiohttp.ClientSession, deadline_at: float) -> None:
        delays, furthest, why = _BACKOFF.delays(), 0, "there is no peer that has it"
        while True:
            url = await self._sources.choose()
            if url is not None:
                try:
                    async with asyncio.timeout(deadline_at - time.monotonic()):
                        await self._attempt(session, url)
                except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                    why = f"{url}: {error}" if str(error) else f"{url}: {type(error).__name__}"
                    self._sources.failed(url)
                else:
                    return
                if self._received > furthest:
                    delays, furthest = _BACKOFF.delays(), self._received
                if time.monotonic() < deadline_at:
                    _log.warning("download resumes", at_byte=self._received, why=why)
                    continue
            wait = next(delays)
            if time.monotonic() + wait > deadline_at:
                received = f"{self._received} of {self._file.size_bytes} bytes received"
                raise WeightsUnavailable(self._label, self._sources.described, f"{why} ({received})")
            await asyncio.sleep(wait)

    async def _attempt(self, session: aiohttp.ClientSession, url: str) -> None:
        if self._received == self._file.size_bytes and self._target.exists():
            return
        headers = {"Accept-Encoding": "identity"}
        if self._received:
            headers["Range"] = f"bytes={self._received}-"
        async with session.get(url, headers=headers, timeout=self._stall) as response:
            response.raise_for_status()
            if not self._continues(response):
                self._start_over()
                if response.status == 206:
                    raise aiohttp.ClientPayloadError("a range came that was not asked for")
            self._contributors.add(url)
            with self._target.open("r+b" if self._received else "wb") as stream:
                stream.seek(self._received)
                async for chunk in response.content.iter_chunked(CHUNK_BYTES):
                    if self._received + len(chunk) > self._file.size_bytes:
                        raise WeightsInvalid(
                            self._label, self._file.name, f"more than the manifest's {self._file.size_bytes} bytes come"
                        )
                    await asyncio.to_thread(self._take, stream.write, chunk)
        if self._received < self._file.size_bytes:
            # Some servers end a cut-off body in order.
            raise aiohttp.ClientPayloadError("the body ended early")

    def _continues(self, response: aiohttp.ClientResponse) -> bool:
        given = response.headers.get("Content-Range", "")
        return response.status == 206 and given.startswith(f"bytes {self._received}-")

    def _start_over(self) -> None:
        self._received, self._sha256 = 0, hashlib.sha256()
        self._contributors.clear()

    def _take(self, write: Callable[[bytes], object], chunk: bytes) -> None:
        self._sha256.update(chunk)
        write(chunk)
        self._received += len(chunk)
