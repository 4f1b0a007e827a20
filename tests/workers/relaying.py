"""Relays, workers and upstreams of tests, in one process, and what passed between them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from rollout_buffer.v1 import weights_pb2
from rollout_workers.relay.options import RelayOptions
from rollout_workers.relay.server import Relay
from rollout_workers.versions import Version
from rollout_workers.weights.fetching.fetcher import WeightFetcher
from rollout_workers.weights.transfer.client import WeightClient

V1 = Version(1, 1)


class Upstream:
    """Upstream that has `files` by their SHA-256 in hexadecimal, and notes what it is asked for and what it sends."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.asked: list[tuple[str, str]] = []
        """Methods and ranges, in order."""
        self.sent_bytes = 0
        self.gate: Callable[[int], Awaitable[None]] | None = None
        """Awaited before each 64 KiB with their place in the file."""
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.method, request.headers.get("Range", "")))
        content = self.files.get(request.match_info["digest"])
        if content is None:
            raise web.HTTPNotFound
        start, stop, _ = request.http_range.indices(len(content))
        partial = "Range" in request.headers
        headers = {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"} if partial else {}
        response = web.StreamResponse(status=206 if partial else 200, headers=headers)
        response.content_length = stop - start
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        for at in range(start, stop, 1 << 16):
            try:
                if self.gate is not None:
                    await self.gate(at)
            except ConnectionResetError:
                assert request.transport is not None
                request.transport.abort()
                return response
            chunk = content[at : min(at + (1 << 16), stop)]
            await response.write(chunk)
            self.sent_bytes += len(chunk)
        return response

    @property
    def gets(self) -> list[str]:
        """Ranges of the requests for content."""
        return [wanted for method, wanted in self.asked if method == "GET"]


@asynccontextmanager
async def upstream(files: dict[str, bytes], *, port: int = 0) -> AsyncIterator[Upstream]:
    made = Upstream(files)
    app = web.Application()
    app.router.add_get("/sha256/{digest}", made.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield made
    finally:
        await runner.cleanup()


@asynccontextmanager
async def relay(directory: Path, *upstreams: str, **options: object) -> AsyncIterator[Relay]:
    given = {"patience_s": 1.0, "drain_grace_s": 0.1, "listen": "127.0.0.1:0", **options}
    made = Relay(RelayOptions(upstreams, directory=directory, **given))  # type: ignore[arg-type]
    await made.start()
    try:
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def worker(root: Path, *mirrors: str) -> AsyncIterator[WeightFetcher]:
    made = WeightFetcher(root, owner="w", keep=2, client=WeightClient(stall_s=3.0), mirrors=mirrors)
    try:
        yield made
    finally:
        await made.close()


def manifest_of(files: dict[str, bytes], base_url: str = "http://127.0.0.1:9/gone") -> weights_pb2.FilesManifest:
    """Make the manifest of files that are named by their digests."""
    listed = [
        weights_pb2.WeightFile(name=f"f{at}", size_bytes=len(content), sha256=bytes.fromhex(digest))
        for at, (digest, content) in enumerate(files.items())
    ]
    return weights_pb2.FilesManifest(base_url=base_url, files=listed)


async def until(met: Callable[[], bool], *, within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not met():  # noqa: ASYNC110 - what it waits for is another process or a disk
            await asyncio.sleep(0.01)
