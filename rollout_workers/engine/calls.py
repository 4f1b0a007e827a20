"""Base of the engines that are servers, and control calls to one, with their deadlines.

What is not a success becomes an error of this package.

Invariant: every call made here may be made twice, because each sets a state and none steps it.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_workers.engine.errors import EngineMalformed, EngineRejected
from rollout_workers.engine.flights import Flights
from rollout_workers.engine.http import HttpConnection, Reply
from rollout_workers.engine.types import DecodingListener, PrefixCache, nobody_counts


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Deadlines of the calls to one server, in seconds, and its other settings."""

    control_timeout_s: float = 15.0
    """Deadline of questions, resume, abort, and pauses that keep their requests."""
    pause_abort_timeout_s: float = 60.0
    """Deadline of a pause that ends every request: a server answers when all are gone."""
    load_timeout_s: float = 120.0
    """Deadline of a load; without a pause it waits for running requests first."""
    generate_timeout_s: float = 600.0
    """Default deadline of `generate`."""
    abort_grace_s: float = 5.0
    """Longest time for an aborted request to hand over the tokens that it has."""
    ready_timeout_s: float = 2.0
    stream: bool = True
    """Have tokens sent as they are made: a server that dies costs none of those that had arrived."""
    stream_interval: int = 16
    """Tokens of a sample between two events of its stream: at most so many are lost with a server."""
    full_queue_wait_s: float = 10.0
    """Time for which a request that finds the server's queue full is sent again, with growing pauses."""
    prefix_cache: PrefixCache = PrefixCache.VERSION
    """Versions of which a request may use what is cached."""
    counts_as: str = ""
    """Release that the server is taken for; empty: the one that it says."""
    config_path: Path | None = None
    """Directory with the model's config.json here, where the path that the server names is another machine's."""
    sees_files: bool = False
    """True if the server sees this worker's files: then images go by name."""
    reconnect_s: float = 5.0
    """Time after which an engine that refuses connections is reported unavailable."""


class HttpCalls:
    """Questions and commands to the server behind `http`. Raises EngineTimeout, EngineUnavailable."""

    def __init__(self, http: HttpConnection, options: ServerOptions) -> None:
        self.http = http
        self.options = options

    @property
    def address(self) -> str:
        """Base URL of the server."""
        return self.http.base_url

    async def get(self, path: str, doing: str) -> dict[str, Any]:
        """Ask the server for a JSON object. Raises EngineRejected, EngineMalformed."""
        reply = await self.http.call(
            "GET", path, doing=doing, deadline_s=self.options.control_timeout_s, repeatable=True
        )
        if reply.status != 200:
            raise EngineRejected(self.address, doing, reply.status, reply.message)
        if not isinstance(reply.body, dict):
            raise EngineMalformed(self.address, doing, f"no JSON object: {reply.message}")
        return reply.body

    async def post(
        self, path: str, body: object, doing: str, *, deadline_s: float | None = None, repeatable: bool = True
    ) -> Reply:
        """Send a command; returns whatever the server says to it."""
        allowed_s = self.options.control_timeout_s if deadline_s is None else deadline_s
        return await self.http.call("POST", path, body, doing=doing, deadline_s=allowed_s, repeatable=repeatable)

    async def post_ok(self, path: str, body: object, doing: str, *, deadline_s: float | None = None) -> None:
        """Send a command that has to succeed. Raises EngineRejected."""
        reply = await self.post(path, body, doing, deadline_s=deadline_s)
        if reply.status != 200:
            raise EngineRejected(self.address, doing, reply.status, reply.message)


class HttpEngine:
    """Base of the engines that are servers: the connection to one, and what is under way there.

    Use one event loop, and one object per server: a second controller that pauses or loads behind its back is not
    noticed. `headers` go with every call (an API key, say). What its methods do, the port Engine says.
    """

    def __init__(
        self, base_url: str, *, options: ServerOptions | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        self.options = options or ServerOptions()
        self.on_decoding: DecodingListener = nobody_counts
        self._http = HttpConnection(base_url, reconnect_s=self.options.reconnect_s, headers=headers)
        self._calls = HttpCalls(self._http, self.options)
        self._flights = Flights(self.address)
        self._connecting = asyncio.Lock()

    @property
    def address(self) -> str:
        """Base URL of the server."""
        return self._http.base_url

    @property
    def tokens_in_hand(self) -> int:
        """Tokens that have arrived of calls that are under way."""
        return self._flights.tokens_in_hand

    def give_up(self, why: str) -> None:
        """End every `generate` under way."""
        self._flights.end_calls(why)

    def take_cut_off(self) -> int:
        """Tokens that had arrived of calls that were cancelled, since this was asked last."""
        return self._flights.take_cut_off()

    def _say_decoding(self, by: int) -> None:
        self.on_decoding(by)
