"""Files of a manifest over http(s), in ranges: a connection that breaks is taken up where it broke.

The checksum runs along with the bytes, so that nothing is read twice.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import structlog

from buffer_wire.retry import Backoff
from rollout_buffer.v1 import weights_pb2
from rollout_workers.errors import WeightsInvalid, WeightsUnavailable
from rollout_workers.weights.files import CHUNK_BYTES, check_content

_BACKOFF = Backoff(first_s=0.1, ceiling_s=2.0)
_log = structlog.get_logger()


class Download:
    """One file on its way."""

    def __init__(self, label: str, url: str, file: weights_pb2.WeightFile, target: Path, *, stall_s: float) -> None:
        self._label = label
        self._url = url
        self._file = file
        self._target = target
        self._stall = aiohttp.ClientTimeout(total=None, sock_connect=stall_s, sock_read=stall_s)
        self._received = 0
        self._sha256 = hashlib.sha256()

    async def run(self, session: aiohttp.ClientSession, deadline_at: float) -> None:
        """Fetch until complete and checked; `deadline_at` on the monotonic clock.

        Raises WeightsUnavailable at the deadline, WeightsInvalid for wrong content, which is then deleted.
        """
        delays, furthest = _BACKOFF.delays(), 0
        while True:
            try:
                async with asyncio.timeout(deadline_at - time.monotonic()):
                    await self._attempt(session)
                break
            except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                why = str(error) or type(error).__name__
            if self._received > furthest:
                delays, furthest = _BACKOFF.delays(), self._received
            wait = next(delays)
            if time.monotonic() + wait > deadline_at:
                raise WeightsUnavailable(
                    self._label, self._url, f"{why} ({self._received} of {self._file.size_bytes} bytes received)"
                )
            _log.warning("download resumes", url=self._url, at_byte=self._received, why=why)
            await asyncio.sleep(wait)
        try:
            check_content(self._label, self._file, self._received, self._sha256.digest())
        except WeightsInvalid:
            self._target.unlink(missing_ok=True)
            raise

    async def _attempt(self, session: aiohttp.ClientSession) -> None:
        if self._received == self._file.size_bytes and self._target.exists():
            return
        headers = {"Range": f"bytes={self._received}-"} if self._received else {}
        async with session.get(self._url, headers=headers, timeout=self._stall) as response:
            response.raise_for_status()
            if not self._continues(response):
                self._received, self._sha256 = 0, hashlib.sha256()
                if response.status == 206:
                    raise aiohttp.ClientPayloadError("a range came that was not asked for")
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

    def _take(self, write: Callable[[bytes], object], chunk: bytes) -> None:
        self._sha256.update(chunk)
        write(chunk)
        self._received += len(chunk)
