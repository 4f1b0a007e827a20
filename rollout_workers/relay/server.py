"""The relay's http: files by their SHA-256, in ranges, also while they come; health and metrics for everybody."""

import structlog
from aiohttp import web

from buffer_wire.weights.door import digest_in
from rollout_workers.relay.disk import Disk
from rollout_workers.relay.fetches import Fetch, Fetches, NoRoom, NotThere, NoUpstream
from rollout_workers.relay.options import RelayOptions
from rollout_workers.weights.server import Listener, door_of, host_and_port
from rollout_workers.weights.transfer.client import WeightClient

_METRICS = {
    "rollout_buffer_relay_sent_bytes_total": "counter",
    "rollout_buffer_relay_fetched_bytes_total": "counter",
    "rollout_buffer_relay_fetches_total": "counter",
    "rollout_buffer_relay_fetch_failures_total": "counter",
    "rollout_buffer_relay_requests_total": "counter",
    "rollout_buffer_relay_refused_total": "counter",
    "rollout_buffer_relay_evictions_total": "counter",
    "rollout_buffer_relay_files": "gauge",
    "rollout_buffer_relay_disk_bytes": "gauge",
    "rollout_buffer_relay_fetching": "gauge",
}

_log = structlog.get_logger()


class Relay:
    """Relay of weights. Raises InvalidField for files of its access that cannot be used."""

    def __init__(self, options: RelayOptions) -> None:
        self._options = options
        self._client = WeightClient(options.access, stall_s=options.patience_s, max_mbps=options.max_mbps)
        self._disk = Disk(options.directory, options.max_bytes)
        self._fetches = Fetches(options.upstreams, self._disk, self._client, patience_s=options.patience_s)
        host, port = host_and_port(options.listen)
        self._listener = Listener(
            {"/sha256/{digest}": self._answer},
            host=host,
            port=port,
            door=door_of(options.listen, options.access, options.tls_cert, options.tls_key),
            free={"/livez": self._alive, "/readyz": self._alive, "/metrics": self._metrics},
        )
        self._sent_bytes = self._requests = self._refused = 0

    @property
    def url(self) -> str:
        """Base URL, known once it is started."""
        return self._listener.url

    async def start(self) -> None:
        """Read the directory and listen. Raises OSError."""
        self._disk.open()
        _log.info(
            "relay starts", upstreams=self._options.upstreams, files=self._disk.count, bytes=self._disk.used_bytes
        )
        await self._listener.start(grace_s=self._options.drain_grace_s)

    async def close(self) -> None:
        """Stop listening, let transfers end within their grace, and end all fetches."""
        await self._listener.close()
        await self._fetches.close()
        await self._client.close()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        digest = digest_in(request.path.removeprefix("/"))
        if digest is None:
            raise web.HTTPNotFound
        self._requests += 1
        path = await self._disk.find(digest, doubted="no-cache" in request.headers.get("Cache-Control", ""))
        if path is not None:
            start, stop = _range_of(request, path.stat().st_size)
            self._sent_bytes += max(stop - start, 0) if request.method == "GET" else 0
            return web.FileResponse(path)
        try:
            fetch = await self._fetches.of(digest)
        except NotThere:
            self._refused += 1
            raise web.HTTPNotFound(text="no upstream has it\n") from None
        except NoUpstream as error:
            self._refused += 1
            raise web.HTTPBadGateway(text=f"no upstream gives it: {error}\n") from None
        except NoRoom as error:
            self._refused += 1
            _log.warning("no room", file=digest, needs=str(error), max_bytes=self._options.max_bytes)
            raise web.HTTPInsufficientStorage(text=f"no room for {error}\n") from None
        return await self._send(request, fetch)

    async def _send(self, request: web.Request, fetch: Fetch) -> web.StreamResponse:
        """Send a range of a file while it comes."""
        start, stop = _range_of(request, fetch.size)
        if start >= stop and fetch.size:
            headers = {"Content-Range": f"bytes */{fetch.size}"}
            raise web.HTTPRequestRangeNotSatisfiable(headers=headers)
        whole = (start, stop) == (0, fetch.size)
        response = web.StreamResponse(status=200 if whole else 206, headers={"Accept-Ranges": "bytes"})
        response.content_type = "application/octet-stream"
        response.content_length = stop - start
        if not whole:
            response.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{fetch.size}"
        try:
            with fetch.open() as file:
                await response.prepare(request)
                if request.method == "HEAD":
                    return response
                async for chunk in fetch.read(file, start, stop):
                    await response.write(chunk)
                    self._sent_bytes += len(chunk)
        except ConnectionError:
            pass  # The reader has left.
        except EOFError:
            # The reader has to see that this is not the end.
            if request.transport is not None:
                request.transport.abort()
        return response

    async def _alive(self, _: web.Request) -> web.StreamResponse:
        return web.Response(text="ok\n")

    async def _metrics(self, _: web.Request) -> web.StreamResponse:
        values = (
            self._sent_bytes,
            self._client.received_bytes,
            self._fetches.completed,
            self._fetches.failed,
            self._requests,
            self._refused,
            self._disk.evictions,
            self._disk.count,
            self._disk.used_bytes,
            self._fetches.running,
        )
        lines = [
            f"# TYPE {name} {kind}\n{name} {value}\n"
            for (name, kind), value in zip(_METRICS.items(), values, strict=True)
        ]
        return web.Response(text="".join(lines), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


def _range_of(request: web.Request, size: int) -> tuple[int, int]:
    """Bytes [start, stop) that are asked for; all of the file for a header that may be ignored."""
    try:
        start, stop, _ = request.http_range.indices(size)
    except ValueError:
        return 0, size
    return start, stop
