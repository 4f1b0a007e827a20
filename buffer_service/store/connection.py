"""The transport: how scripts and payloads get to the store and back.

Knows nothing of the rules. Invariants: a script is never sent twice unless its first try certainly did not run;
payloads and the script that indexes them go out in one transaction, so near maxmemory either both happen or neither;
every wait has a deadline and ends in StoreUnavailable, StoreOutOfMemory or StoreUnsuitable.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from buffer_service.domain.ops import Buffer
from buffer_service.store.address import Address
from buffer_service.store.keys import index_key, payload_size
from buffer_service.store.resp import Command, ConnectionLost, Part, ReplyError, RespConnection
from buffer_service.store.scripts import Script, load_scripts
from buffer_wire.errors import (
    RolloutBufferError,
    StoreFault,
    StoreOutOfMemory,
    StoreUnavailable,
    StoreUnsuitable,
)

REPLY_BYTES = 4 << 20
"""Most bytes of payloads asked for in one command."""

CONNECT_TIMEOUT_S = 5.0
LOADING_TIMEOUT_S = 10.0
LOADING_PAUSE_S = 0.05


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


class _Link:
    """A connection that is made when it is needed and made again after it was lost."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._connection: RespConnection | None = None
        self._connecting = asyncio.Lock()

    async def get(self) -> RespConnection:
        """The living connection. Raises StoreUnavailable, StoreUnsuitable."""
        connection = self._connection
        if connection is None or connection.lost is not None:
            async with self._connecting:
                connection = self._connection
                if connection is None or connection.lost is not None:
                    connection = self._connection = await connect(self._address)
        return connection

    def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            self._connection.abort("closed by this side")
            self._connection = None


async def connect(address: Address, on_push: Callable[[Any], None] | None = None) -> RespConnection:
    """A new connection that has introduced itself. Raises StoreUnavailable, StoreUnsuitable."""
    loop = asyncio.get_running_loop()

    def make() -> RespConnection:
        return RespConnection(on_push)

    connection: RespConnection | None = None
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            if address.path:
                # The kernel's small default buffer is right: with 2 MB the store's CPU rose from 0.5 to 0.7 s/GB, for
                # what is written has then left the caches before it is read.
                _, connection = await loop.create_unix_connection(make, address.path)
            else:
                _, connection = await loop.create_connection(
                    make, address.host, address.port, ssl=address.ssl_context()
                )
            await _introduce(connection, address)
            return connection
    except BaseException as error:
        if connection is not None:
            connection.abort("it did not get to work")
        if isinstance(error, (OSError, TimeoutError, ConnectionLost)):
            raise StoreUnavailable(address.shown, str(error) or "no answer in time") from error
        raise


async def _introduce(connection: RespConnection, address: Address) -> None:
    greeting = address.greeting()
    for reply in await connection.request(greeting) if greeting else ():
        if isinstance(reply, ReplyError):
            raise StoreUnsuitable(address.shown, f"it refuses the address's credentials or database: {reply}")


class StoreConnection:
    """Connections to one store: one for scripts and commands, and two for payloads, which would hold the others up."""

    def __init__(self, url: str, *, timeout_s: float = 30.0) -> None:
        self.address = Address.parse(url)
        self.name = self.address.shown
        self._timeout_s = timeout_s
        self._control = _Link(self.address)
        self._writes = _Link(self.address)
        self._reads = _Link(self.address)

    async def open(self) -> None:
        """Load the scripts. Raises StoreUnavailable."""
        await self._load_scripts()

    async def close(self) -> None:
        """Close all connections."""
        for link in (self._control, self._writes, self._reads):
            link.close()

    async def run(self, script: Script, run_id: str, arguments: bytes) -> Buffer:
        """Run a script on a run's keys; its packed reply."""
        call = ("EVALSHA", script.sha, 1, index_key(run_id, "run"), arguments)
        (reply,) = await self._exchange(self._control, [call])
        if isinstance(reply, ReplyError) and reply.code == "NOSCRIPT":
            await self._load_scripts()
            (reply,) = await self._exchange(self._control, [call])
        packed: Buffer = self._checked(reply)
        return packed

    async def store_and_run(
        self, payloads: Sequence[tuple[str, Buffer]], script: Script, run_id: str, arguments: bytes
    ) -> Buffer:
        """Stage and store payloads and run the script that indexes them, all in one transaction."""
        now = int(time.time() * 1000)
        staged: list[Part] = []
        stored: list[Part] = []
        for key, body in payloads:
            staged += (now, key)
            stored += (key, body)
        commands: list[Command] = [
            ("MULTI",),
            ("ZADD", index_key(run_id, "staging"), *staged),
            ("MSET", *stored),
            ("EVALSHA", script.sha, 1, index_key(run_id, "run"), arguments),
            ("EXEC",),
        ]
        *queued, replies = await self._exchange(self._writes, commands)
        for reply in queued:
            self._checked(reply)
        *_, reply = self._checked(replies)
        if isinstance(reply, ReplyError) and reply.code == "NOSCRIPT":
            # The payloads are stored and staged; only the index is missing.
            return await self.run(script, run_id, arguments)
        packed: Buffer = self._checked(reply)
        return packed

    async def fetch(self, payload_keys: Sequence[str]) -> list[Buffer | None]:
        """Payloads in order, None where one is gone; at most REPLY_BYTES are asked for at once."""
        bodies: list[Buffer | None] = []
        for portion in portions(payload_keys):
            (reply,) = await self._exchange(self._reads, [("MGET", *portion)])
            bodies += self._checked(reply)
        return bodies

    async def command(self, *parts: Part) -> Any:  # noqa: ANN401 - replies are of any type
        """Send one command."""
        (reply,) = await self._exchange(self._control, [parts])
        return self._checked(reply)

    async def _load_scripts(self) -> None:
        commands = [("SCRIPT", "LOAD", script.source) for script in load_scripts().values()]
        for reply in await self._exchange(self._control, commands):
            self._checked(reply)

    async def _exchange(self, link: _Link, commands: Sequence[Command]) -> list[Any]:
        """Send commands and wait for their replies; waits while the store loads its data."""
        loop = asyncio.get_running_loop()
        loading_until = loop.time() + LOADING_TIMEOUT_S
        while True:
            connection = await link.get()
            # The whole connection ends: later replies would wait behind the one that does not come. A timer costs half
            # of what asyncio.timeout does, and there is one for every call.
            late = loop.call_later(self._timeout_s, connection.abort, f"no answer within {self._timeout_s:g} s")
            try:
                replies = await connection.request(commands)
            except ConnectionLost as error:
                raise StoreUnavailable(self.name, str(error)) from error
            finally:
                late.cancel()
            if not _is_loading(replies):
                return replies
            if loop.time() > loading_until:
                raise StoreUnavailable(self.name, "it is still loading its data")
            await asyncio.sleep(LOADING_PAUSE_S)

    def _checked(self, reply: Any) -> Any:  # noqa: ANN401
        if isinstance(reply, ReplyError):
            raise self._fault(reply) from reply
        return reply

    def _fault(self, reply: ReplyError) -> RolloutBufferError:
        message = str(reply)
        if reply.code == "OOM" or "OOM command not allowed" in message:
            return StoreOutOfMemory(self.name)
        if reply.code in {"LOADING", "BUSY", "READONLY", "MASTERDOWN", "MISCONF"}:
            return StoreUnavailable(self.name, message)
        if reply.code in {"NOAUTH", "WRONGPASS", "NOPERM"}:
            return StoreUnsuitable(self.name, message)
        return StoreFault(f"the store at {self.name} answered: {message}", store=self.name)


def _is_loading(replies: Sequence[Any]) -> bool:
    """Nothing of the request ran because the store loads its data (a transaction is refused when its commands are)."""
    errors = [reply for reply in replies if isinstance(reply, ReplyError)]
    return isinstance(replies[-1], ReplyError) and any(error.code == "LOADING" for error in errors)
