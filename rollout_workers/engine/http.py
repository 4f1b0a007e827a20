"""JSON calls to one engine over HTTP, with deadlines, and with failures told apart by what they leave behind.

Invariants: a call ends within its deadline; a call is repeated only if it never left this machine, or if the caller
says that repeating it is harmless.
"""

import asyncio
import io
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp

from buffer_wire.tracing.process import carried
from rollout_workers.engine.errors import EngineTimeout, EngineUnavailable

# uvicorn drops a connection that was idle for 5 s (SGLANG_TIMEOUT_KEEP_ALIVE). One that we reuse at that moment fails
# without a trace of whether the request arrived, and a generation cannot be repeated on that account: let go earlier.
_IDLE_CONNECTION_S = 2.0

_FIRST_RETRY_S = 0.05
_LONGEST_RETRY_S = 1.0
_JSON = (("Content-Type", "application/json"),)


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer, whatever its status."""

    status: int
    body: Any
    """Parsed JSON, or text where it is not JSON; None for an empty body, and for one passed on piece by piece."""

    @property
    def message(self) -> str:
        """Text of the engine's answer for an error message, at most 500 characters."""
        body = self.body
        if isinstance(body, dict):
            error = body.get("error", body.get("message", body.get("detail", body)))
            body = error.get("message", error) if isinstance(error, dict) else error
        return str(body)[:500]


class HttpConnection:
    """Connections to one base URL, opened when the first call needs one.

    `reconnect_s`: an engine that cannot be reached for so long is given up, however long the call's deadline is.
    """

    def __init__(self, base_url: str, *, reconnect_s: float = 5.0, headers: Mapping[str, str] | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        self._reconnect_s = reconnect_s
        self._headers = dict(headers or {})
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        doing: str,
        deadline_s: float,
        repeatable: bool,
        on_data: Callable[[bytes], None] | None = None,
    ) -> Reply:
        """Make one call, repeated with growing pauses while the engine cannot be reached.

        `body`: a value to send as JSON, or bytes that are JSON already. `doing` completes "... while". `repeatable`:
        the call may have arrived and can be made again all the same. `on_data` is given a good answer (status 200)
        piece by piece as it arrives, in place of the reply's body; what it raises ends the call. Raises EngineTimeout,
        EngineUnavailable.
        """
        if self._closed:
            # What cleans up after a call that was cut off by it comes too late.
            raise EngineUnavailable(self.base_url, doing, "the connection was closed")
        deadline = time.monotonic() + deadline_s
        give_up: float | None = None
        pause_s = _FIRST_RETRY_S
        while True:
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    return await self._once(method, path, body, on_data)
            except TimeoutError as error:
                raise EngineTimeout(self.base_url, doing, deadline_s) from error
            except (aiohttp.ClientError, ConnectionError) as error:
                never_sent = isinstance(error, aiohttp.ClientConnectorError)
                give_up = min(deadline, time.monotonic() + self._reconnect_s) if give_up is None else give_up
                if not (never_sent or repeatable) or time.monotonic() + pause_s >= give_up:
                    raise EngineUnavailable(self.base_url, doing, str(error) or type(error).__name__) from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_RETRY_S)

    async def _once(
        self, method: str, path: str, body: object, on_data: Callable[[bytes], None] | None = None
    ) -> Reply:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                # The number of requests is bounded by the worker's concurrency; deadlines are ours, one per call.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_CONNECTION_S),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        ready_made: Any = {"data": io.BytesIO(body)} if isinstance(body, bytes) else {"json": body}
        fields = [*(_JSON if isinstance(body, bytes) else ()), *carried()]
        async with self._session.request(method, self.base_url + path, headers=fields, **ready_made) as response:
            if on_data is not None and response.status == HTTPStatus.OK:
                async for data in response.content.iter_any():
                    on_data(data)
                return Reply(response.status, None)
            raw = await response.read()
        try:
            return Reply(response.status, json.loads(raw) if raw else None)
        except ValueError:
            return Reply(response.status, raw.decode(errors="replace"))

    async def close(self) -> None:
        """Drop all connections, for good: what is under way fails, and so does what comes later."""
        self._closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None
