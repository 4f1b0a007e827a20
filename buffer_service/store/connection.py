"""The transport: how scripts and payloads get to the store and back.

Knows nothing of the rules. Invariants: a script is never sent twice unless its first try certainly did not run; payloads
and the script that indexes them go out in one transaction, so near maxmemory either both happen or neither; every wait
has a deadline and ends in StoreUnavailable, StoreOutOfMemory or StoreUnsuitable.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from redis import exceptions as redis_errors
from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from buffer_service.domain.ops import Buffer
from buffer_service.store.keys import index_key, payload_size
from buffer_service.store.scripts import Script, load_scripts
from buffer_wire.errors import StoreFault, StoreOutOfMemory, StoreUnavailable, StoreUnsuitable

T = TypeVar("T")

REPLY_BYTES = 4 << 20
"""Most bytes of payloads asked for in one command."""

LOADING_WAIT_S = 0.1


def redacted(url: str) -> str:
    """The address without its password, for errors and logs."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{host}"))


def client_url(url: str) -> str:
    """The address as redis-py spells it. Raises StoreUnsuitable for a scheme that is no store's."""
    aliases = {"valkey": "redis", "valkeys": "rediss", "redis": "redis", "rediss": "rediss", "unix": "unix"}
    scheme, _, rest = url.partition("://")
    if scheme not in aliases or not rest:
        raise StoreUnsuitable(
            redacted(url), "its address must be unix:///path, redis://host:port or rediss://host:port"
        )
    return f"{aliases[scheme]}://{rest}"


def portions(payload_keys: Sequence[str]) -> list[Sequence[str]]:
    """The keys split so that each portion's payloads stay below REPLY_BYTES (or are one payload)."""
    split: list[Sequence[str]] = []
    first, size = 0, 0
    for index, key in enumerate(payload_keys):
        size += payload_size(key)
        if size > REPLY_BYTES and index > first:
            split.append(payload_keys[first:index])
            first, size = index, payload_size(key)
    if first < len(payload_keys):
        split.append(payload_keys[first:])
    return split


class StoreConnection:
    """A pool of connections to one store. `open` before use, `close` after."""

    def __init__(self, url: str, *, timeout_s: float = 30.0, max_connections: int = 64) -> None:
        self.name = redacted(url)
        self._timeout_s = timeout_s
        self._client = Redis.from_url(
            client_url(url),
            max_connections=max_connections,
            socket_timeout=timeout_s,
            socket_connect_timeout=min(timeout_s, 5.0),
            retry=Retry(NoBackoff(), 0),
        )

    async def open(self) -> None:
        """Load the scripts. Raises StoreUnavailable."""
        await self._guard(self._load_scripts)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def run(self, script: Script, run_id: str, arguments: bytes) -> bytes:
        """Run a script on a run's keys."""
        return await self._guard(lambda: self._run(script, run_id, arguments))

    async def store_and_run(
        self, payloads: Sequence[tuple[str, Buffer]], script: Script, run_id: str, arguments: bytes
    ) -> bytes:
        """Stage and store payloads and run the script that indexes them, all in one transaction."""
        return await self._guard(lambda: self._store_and_run(payloads, script, run_id, arguments))

    async def fetch(self, payload_keys: Sequence[str]) -> list[Buffer | None]:
        """Payloads in order, None where one is gone; at most REPLY_BYTES are asked for at once."""
        bodies: list[Buffer | None] = []
        for portion in portions(payload_keys):
            bodies += await self.command("MGET", *portion)
        return bodies

    async def command(self, *arguments: str | int | Buffer) -> Any:  # noqa: ANN401 - replies are of any type
        """Send one command."""
        return await self._guard(lambda: self._client.execute_command(*arguments))

    def pubsub(self) -> PubSub:
        """A subscriber on a connection of its own; the caller handles its errors."""
        return self._client.pubsub(ignore_subscribe_messages=False)

    async def _run(self, script: Script, run_id: str, arguments: bytes) -> bytes:
        try:
            reply: bytes = await self._client.execute_command(
                "EVALSHA", script.sha, 1, index_key(run_id, "run"), arguments
            )
        except redis_errors.NoScriptError:
            await self._load_scripts()
            reply = await self._client.execute_command(
                "EVALSHA", script.sha, 1, index_key(run_id, "run"), arguments
            )
        return reply

    async def _store_and_run(
        self, payloads: Sequence[tuple[str, Buffer]], script: Script, run_id: str, arguments: bytes
    ) -> bytes:
        now = int(time.time() * 1000)
        async with self._client.pipeline(transaction=True) as pipe:
            staged = [part for key, _ in payloads for part in (now, key)]
            pipe.execute_command("ZADD", index_key(run_id, "staging"), *staged)
            for key, body in payloads:
                pipe.execute_command("SET", key, body)
            pipe.execute_command("EVALSHA", script.sha, 1, index_key(run_id, "run"), arguments)
            replies = await pipe.execute(raise_on_error=False)
        reply = replies[-1]
        if isinstance(reply, redis_errors.NoScriptError):
            return await self._run(script, run_id, arguments)
        for outcome in replies:
            if isinstance(outcome, Exception):
                raise outcome
        stored: bytes = reply
        return stored

    async def _load_scripts(self) -> None:
        async with self._client.pipeline(transaction=False) as pipe:
            for script in load_scripts().values():
                pipe.execute_command("SCRIPT LOAD", script.source)
            await pipe.execute()

    async def _guard(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Run `attempt`; waits while the store loads its data; turns the client's errors into the contract's."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return await attempt()
            except redis_errors.BusyLoadingError as error:
                if time.monotonic() + LOADING_WAIT_S > deadline:
                    raise StoreUnavailable(self.name, "it is still loading its data") from error
            except redis_errors.OutOfMemoryError as error:
                raise StoreOutOfMemory(self.name) from error
            except redis_errors.ExecAbortError as error:
                raise StoreFault(f"the store at {self.name} refused a transaction: {error}", store=self.name) from error
            except (redis_errors.ConnectionError, redis_errors.TimeoutError, OSError) as error:
                raise StoreUnavailable(self.name, str(error) or type(error).__name__) from error
            except redis_errors.ReadOnlyError as error:
                raise StoreUnavailable(self.name, "it is a read-only replica") from error
            except redis_errors.ResponseError as error:
                raise StoreFault(f"the store at {self.name} answered: {error}", store=self.name) from error
            await asyncio.sleep(LOADING_WAIT_S)
