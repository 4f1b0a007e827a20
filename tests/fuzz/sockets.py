"""Bytes to the ports themselves: HTTP/1.1 to the admin page, and what is no HTTP/2 to gRPC."""

import asyncio
from random import Random

from tests.fuzz.verdicts import Failure, Verdicts
from tests.fuzz.wire import damaged, random_bytes

METHODS = (b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"TRACE", b"CONNECT", b"PRI", b"get", b"X" * 300)
PATHS = (
    b"/",
    b"/api",
    b"/api/runs",
    b"/api/runs/fuzz-0",
    b"/api/runs/nobody",
    b"/api/runs/fuzz-0/groups",
    b"/api/runs/fuzz-0/groups?step=0",
    b"/api/runs/fuzz-0/groups?step=%00&step=9999999999999999",
    b"/api/runs/fuzz-0/groups/%ed%a0%80/0",
    b"/api/runs/fuzz-0/groups/x/0?sample=-1",
    b"/api/events?run=fuzz-0",
    b"/api/events?run=fuzz-1",
    b"/livez",
    b"/readyz",
    b"/metrics",
    b"/page/page.js",
    b"/page/%2e%2e/%2e%2e/etc/passwd",
    b"*",
    b"http://h/metrics",
    b"//api",
    b"/api/runs/%00",
    b"/api/runs/%ed%a0%80%ff",
    b"/api/runs/" + b"a" * 9_000,
    b"/api/events?" + b"run=a&" * 500,
    b"/metrics/",
)
HEADERS = (
    b"Host: h",
    b"Host: [::",
    b"Host: \xff",
    b"Accept-Encoding: gzip, br;q=nan",
    b"Authorization: Basic \xff\xfe",
    b"Authorization: Bearer x",
    b'If-None-Match: W/"", *',
    b"Last-Event-ID: \x80",
    b"Connection: close",
    b"Connection: Upgrade\r\nUpgrade: websocket",
    b"Content-Length: 5",
    b"Content-Length: -1",
    b"Content-Length: 99999999999999999999",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: gzip, chunked",
    b"Expect: 100-continue",
    b"Range: bytes=5-1",
    b"Cookie: " + b"c" * 9_000,
    b"X: " + b"y" * 20_000,
    b": nameless",
    b"Bad Name: v",
    b"Folded: a\r\n b",
)
BODIES = (b"", b"", b"hello", b"5\r\nhello\r\n0\r\n\r\n", b"no size\r\n", b"fffffffffffffffff\r\n", b"\x00" * 3_000)
REQUESTS_OF_A_CONNECTION = 8
READ_S = 0.1


class HttpLane:
    """Sends requests, whole ones and parts, over one connection after another."""

    def __init__(self, admin: str, grpc_address: str, number: int, seed: int, verdicts: Verdicts) -> None:
        self._admin = admin
        self._grpc = grpc_address
        self._rng = Random(f"{seed}/http/{number}")
        self._verdicts = verdicts

    async def send_on(self) -> None:
        while await self._verdicts.left("http"):
            if self._rng.random() < 0.1:
                await self._to_grpc()
            else:
                await self._connection()

    async def _connection(self) -> None:
        rng = self._rng
        reader, writer = await _open(self._admin)
        sent: list[bytes] = []
        try:
            for _ in range(rng.choice((1, 1, REQUESTS_OF_A_CONNECTION))):
                request = self._request()
                sent.append(request)
                self._verdicts.sent["http"] += 1
                half = rng.randint(0, len(request)) if rng.random() < 0.2 else len(request)
                writer.write(request[:half])
                await writer.drain()
                if half < len(request):
                    if rng.random() < 0.5:
                        return  # Half a request, and gone.
                    writer.write(request[half:])
                answer = await _read(reader)
                status = answer[9:12].decode("latin-1") if answer.startswith(b"HTTP/1.1 ") else "none"
                self._verdicts.codes["(http)", status] += 1
                if status.startswith("5") and status != "503":
                    self._verdicts.fail(Failure(f"HTTP {status}", f"http {status}", "(admin port)", b"".join(sent)))
        except (OSError, RuntimeError):
            pass
        finally:
            if rng.random() < 0.5:
                writer.transport.abort()
            writer.close()

    def _request(self) -> bytes:
        rng = self._rng
        draw = rng.random()
        method = b"GET" if draw < 0.7 else rng.choice(METHODS)
        headers = [b"Host: h"] if rng.random() < 0.9 else []
        headers += rng.choices(HEADERS, k=rng.choice((0, 0, 1, 1, 2, 5)))
        version = rng.choice((b"1.1", b"1.1", b"1.1", b"1.1", b"1.0", b"0.9", b"2", b"1.9"))
        head = b" ".join((method, rng.choice(PATHS), b"HTTP/" + version))
        request = b"\r\n".join((head, *headers, b"", rng.choice(BODIES)))
        if rng.random() < 0.2:
            request = damaged(rng, request)
        return request or b"\r\n"

    async def _to_grpc(self) -> None:
        rng = self._rng
        _, writer = await _open(self._grpc)
        try:
            if rng.random() < 0.7:
                writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            for _ in range(rng.choice((1, 3, 20))):
                self._verdicts.sent["http"] += 1
                size = rng.choice((0, 4, 9, 40))
                frame = size.to_bytes(3) + bytes((rng.randrange(12), rng.randrange(256))) + rng.randbytes(4)
                writer.write((frame if rng.random() < 0.8 else random_bytes(rng)) + rng.randbytes(size))
            await writer.drain()
        except (OSError, RuntimeError):
            pass
        finally:
            writer.close()


async def _open(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def _read(reader: asyncio.StreamReader) -> bytes:
    """Return what comes first; nothing for a request that is not whole, or whose answer does not come at once."""
    try:
        async with asyncio.timeout(READ_S):
            return await reader.read(1 << 20)
    except TimeoutError:
        return b""
