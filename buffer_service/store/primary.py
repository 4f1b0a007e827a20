"""Connections to the store's primary: straight to its address, or to the server that the Sentinels name.

Invariants: a connection that is handed out has introduced itself, and knows which life of which server it leads to.
That server evicts nothing; where Sentinels named it, it also said that it is a primary. As soon as another server is
known to be the primary every connection to the former one is ended. So no two are used that lead to different servers.
None begins once this side has ended them for good, and none to the Sentinels once it has closed those.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from buffer_service.domain.ops import StorePlace
from buffer_service.store.address import Address, Sentinels
from buffer_service.store.suitability import fields_of, refuse_eviction
from buffer_wire.errors import StoreUnavailable, StoreUnsuitable
from buffer_wire.resp.errors import ConnectionLost, ReplyError
from buffer_wire.resp.protocol import RespConnection

CONNECT_TIMEOUT_S = 5.0
NAMED_TIMEOUT_S = 2.0
"""Longest time to connect to the server that the Sentinels name: it may be gone, and another one be named soon."""
FAILOVER_PATIENCE_S = 1.0
"""Longest wait, in seconds, of a call for the Sentinels to name a primary, while nothing of the call has been sent.

Callers try again by themselves, and want to know for what.
"""
FAILOVER_PAUSE_S = 0.1
ANSWER_TIMEOUT_S = 0.5
"""Longest wait, in seconds, for the answer of a Sentinel, or of a cluster's node; then the next one is asked."""
WATCH_S = 1.0
"""Period, in seconds, of asking the Sentinels whether the primary is still the same.

A host that is gone answers nothing, so the connections to it would be waited for much longer.
"""


class Primary:
    """Primary of the store: where it is, and all connections that were made to it."""

    def __init__(self, address: Address, connect_timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        self.address = address
        self._connect_timeout_s = connect_timeout_s if address.sentinels is None else NAMED_TIMEOUT_S
        self._where = ""
        self._ended = ""
        """Reason why this side has ended all connections for good."""
        self._connections: WeakSet[RespConnection] = WeakSet()
        self._sentinel = _client(address) if address.sentinels is not None else None
        self._question: asyncio.Task[tuple[str, int]] | None = None
        """Question to the Sentinels that is under way: one at a time, for all who ask."""

    async def connect(self, on_push: Callable[[Any], None] | None = None) -> RespConnection:
        """A new connection that has introduced itself. Raises StoreUnavailable, StoreUnsuitable.

        With Sentinels it tries for FAILOVER_PATIENCE_S until they name a primary that says it is one.
        """
        if self._sentinel is None:
            return await self._connect(self.address, on_push)
        until = time.monotonic() + FAILOVER_PATIENCE_S
        while True:
            try:
                return await self._connect(self.address.at(*await self._named()), on_push)
            except StoreUnavailable as error:
                if self._ended:
                    raise
                if time.monotonic() > until:
                    raise StoreUnavailable(
                        self.address.shown,
                        f"its Sentinels name no primary that works; the last answer: {error.message}",
                    ) from error
            await asyncio.sleep(FAILOVER_PAUSE_S)

    def place(self) -> StorePlace:
        """Place of the store as the newest connection found it; without host and path before the Sentinels named it."""
        address, host, port = self.address, self.address.host, self.address.port
        if self._sentinel is not None:
            host, _, number = self._where.rpartition(":")
            port = int(number or 0)
        return StorePlace(address.shown, address.path, host, port, address.tls, address.database)

    async def watch(self) -> None:
        """End the connections to a former primary once the Sentinels name another one; runs until cancelled."""
        while self._sentinel is not None:
            with contextlib.suppress(StoreUnavailable):
                host, port = await self._named()
                self._is_at(f"{host}:{port}")
            await asyncio.sleep(WATCH_S)

    def leave(self, connection: RespConnection, why: str) -> None:
        """End the connection and all others: the server has said that it is not the primary."""
        connection.abort(why)
        self._end_present(why)

    def end(self, why: str) -> None:
        """End all connections to the store, also those that are still to come: who waits for one is told why."""
        self._ended = why
        self._end_present(why)

    async def close(self) -> None:
        """End all connections for good, also those to the Sentinels."""
        self.end("closed by this side")
        if self._question is not None:
            await asyncio.wait([self._question])
        if self._sentinel is not None:
            for client in self._sentinel.sentinels:
                await client.aclose()

    async def _named(self) -> tuple[str, int]:
        """Ask the Sentinels for host and port of the primary. Raises StoreUnavailable."""
        self._refuse_at_the_end()
        if self._question is None or self._question.done():
            # A task of its own that is never cancelled, and ends by its time-outs: a cancellation may get lost in
            # redis-py, and of two questions at once its client may forget a Sentinel while it moves one to the front.
            self._question = asyncio.create_task(self._ask(), name="store-sentinels")
            self._question.add_done_callback(consume_failure)
        return await asyncio.shield(self._question)

    async def _ask(self) -> tuple[str, int]:
        assert self._sentinel is not None  # noqa: S101 - its callers have checked
        assert self.address.sentinels is not None  # noqa: S101 - same
        try:
            host, port = await self._sentinel.discover_master(self.address.sentinels.service)
        except (RedisError, OSError) as error:
            raise StoreUnavailable(self.address.shown, str(error)) from error
        return str(host), int(port)

    async def _connect(self, address: Address, on_push: Callable[[Any], None] | None) -> RespConnection:
        self._refuse_at_the_end()
        connection, role = await _open(address, on_push, self._connect_timeout_s)
        if self._ended:
            connection.abort(self._ended)
            self._refuse_at_the_end()
        if self._sentinel is not None:
            if role != "master":
                connection.abort("it is no primary")
                raise StoreUnavailable(address.shown, f"its role is {role} although the Sentinels name it the primary")
            self._is_at(f"{address.host}:{address.port}")
        self._connections.add(connection)
        return connection

    def _is_at(self, where: str) -> None:
        if where != self._where:
            self._end_present(f"the primary is now {where}")
            self._where = where

    def _end_present(self, why: str) -> None:
        for made in list(self._connections):
            made.abort(why)

    def _refuse_at_the_end(self) -> None:
        if self._ended:
            raise StoreUnavailable(self.address.shown, self._ended)


def consume_failure(question: asyncio.Task[Any]) -> None:
    """Consume the question's failure: the callers may be gone by then."""
    if not question.cancelled():
        question.exception()


def options_of_asking(address: Address, username: str, password: str) -> dict[str, Any]:
    """Options of redis-py's connections to those who know where the servers are: Sentinels, or a cluster's nodes."""
    options: dict[str, Any] = {
        "socket_timeout": ANSWER_TIMEOUT_S,
        "socket_connect_timeout": ANSWER_TIMEOUT_S,
        # The next one is asked at once.
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        "username": username or None,
        "password": password or None,
    }
    if address.tls:
        options["ssl"] = True
        options["ssl_ca_certs"] = str(address.ca) if address.ca is not None else None
    return options


def _client(address: Address) -> Sentinel:
    sentinels = address.sentinels or Sentinels((), "")
    options = options_of_asking(address, sentinels.username, sentinels.password)
    return Sentinel(list(sentinels.hosts), sentinel_kwargs=options)  # type: ignore[no-untyped-call]


async def _open(
    address: Address, on_push: Callable[[Any], None] | None, timeout_s: float
) -> tuple[RespConnection, str]:
    """A connection that knows its server, and the server's role."""
    loop = asyncio.get_running_loop()

    def make() -> RespConnection:
        return RespConnection(on_push)

    connection: RespConnection | None = None
    try:
        async with asyncio.timeout(timeout_s):
            if address.path:
                # The kernel's small default buffer is right: with 2 MB the store's CPU rose from 0.5 to 0.7 s/GB, for
                # what is written has then left the caches before it is read.
                _, connection = await loop.create_unix_connection(make, address.path)
            else:
                _, connection = await loop.create_connection(
                    make, address.host, address.port, ssl=address.ssl_context()
                )
            return connection, await _introduce(connection, address)
    except BaseException as error:
        if connection is not None:
            connection.abort("it did not get to work")
        if isinstance(error, (OSError, TimeoutError, ConnectionLost)):
            raise StoreUnavailable(address.shown, str(error) or "no answer in time") from error
        raise


async def _introduce(connection: RespConnection, address: Address) -> str:
    sections = ("server", "replication", "memory", "persistence")
    questions: list[tuple[str | int, ...]] = [*(("INFO", section) for section in sections), ("ROLE",)]
    *_, server, replication, memory, persistence, role = replies = await connection.request(
        [*address.greeting(), *questions]
    )
    for reply in replies:
        if isinstance(reply, ReplyError):
            raise StoreUnsuitable(address.shown, f"it refuses the address's credentials or database: {reply}")
    # Of every server anew: a replica that was promoted has settings of its own.
    refuse_eviction(address.shown, fields_of(memory))
    connection.server = fields_of(server)["run_id"]
    # A server gets a new replication id whenever it becomes a primary.
    connection.tenure = f"{connection.server}/{fields_of(replication)['master_replid']}"
    persisted = fields_of(persistence)
    # A server that loads its append-only file says that it has none.
    connection.appends = persisted.get("aof_enabled") == "1" or persisted.get("loading") == "1"
    return str(role[0], "ascii")
