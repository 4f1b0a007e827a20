"""Readers of payloads: a trainer reads the groups of its batch from the store, where the service lets it.

Both check every group against its key. What is missing or wrong raises PayloadsUnreadable; then the caller has the
service relay the batch, and check it.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from buffer_wire.codec import Buffer
from buffer_wire.errors import RolloutBufferError
from buffer_wire.payloads.access import Place, StoreAccess
from buffer_wire.payloads.keys import PORTION_BYTES as ASYNC_PORTION_BYTES
from buffer_wire.payloads.keys import is_key_of, is_of, part_keys, parts_of, portions, size_of
from buffer_wire.payloads.turns import Turns
from buffer_wire.payloads.way import AsyncWay, WayLost
from buffer_wire.resp.blocking import BlockingConnection, memory_of
from buffer_wire.resp.encoding import Parts
from buffer_wire.resp.errors import ConnectionLost, OtherReply, ReplyError
from buffer_wire.resp.protocol import RespConnection
from rollout_buffer.v1 import payloads_pb2

PORTION_BYTES = 8 << 20
"""Largest number of bytes of payloads that the blocking reader receives into one piece of memory.

In small pieces the faults of their pages take more than half of the reader's CPU.
"""
READ_TIMEOUT_S = 15.0
"""Longest wait for the store's answer to one portion of a batch."""
CONNECT_TIMEOUT_S = 2.0
"""Longest wait for a connection to one address of the store, greeting and TLS included."""


class PayloadsUnreadable(Exception):
    """Payloads could not be read, or are not what their keys say. The text names the reason, and the key."""


class PayloadReader:
    """Blocking reader of one run's payloads, for any threads of one process.

    `client_id` names it in logs. `ask` calls GetReadAccess with the trouble it is given, and may raise any error of the
    contract. A reader belongs to the process that made it. A forked child makes its own and neither uses nor closes
    this one. In a process that may fork, `ask` counts as a call into gRPC (`trainer_client.forks.CALLS`). Reading does
    not: a fork need not wait for it.
    """

    def __init__(self, run_id: str, client_id: str, ask: Callable[[str], payloads_pb2.PayloadAccess]) -> None:
        self._run_id = run_id
        self._ask = ask
        self._turns = Turns(f"{client_id}, reading of run {run_id},")
        self._lock = threading.Lock()
        self._access: StoreAccess | None = None
        self._connection: BlockingConnection | None = None
        self._place: Place | None = None

    @property
    def trouble(self) -> str:
        """Reason why the reader could not use what the service gave it last; empty where it could."""
        return self._turns.trouble

    def open(self) -> bool:
        """Get access and connect where that is due. True: pull with `direct`; False: the service relays at present.

        Never raises for faults of store or service. Waits for `ask`, and at most CONNECT_TIMEOUT_S for each address.
        """
        with self._lock:
            if self._connection is not None and not self._connection.is_quiet:
                self._use(None, None, None)
                self._turns.lapsed()
            if self._turns.is_due:
                self._renew()
            return self._connection is not None and self._turns.is_good

    def read(self, keys: Sequence[str]) -> list[memoryview]:
        """The groups under the keys, in order, each checked. Waits at most READ_TIMEOUT_S for each 8 MiB.

        Raises PayloadsUnreadable, after which `open` says False for a while.
        """
        _check_keys(self._run_id, keys)
        with self._lock:
            try:
                return self._read(keys)
            except _Unreadable as error:
                raise PayloadsUnreadable(self._leave(str(error))) from error

    def close(self) -> None:
        """Close the connection, once a read under way is over."""
        with self._lock:
            self._use(None, None, None)

    def _read(self, keys: Sequence[str]) -> list[memoryview]:
        connection = self._connection
        if connection is None:
            raise _Unreadable("not connected")
        asks = _asks(keys, PORTION_BYTES)
        bodies: list[memoryview] = []
        whole = memory_of(0)
        for index, ask in enumerate(asks):
            # While one is received the store makes the next one ready.
            ahead = asks[index + 1 : index + 2] if index else asks[:2]
            try:
                connection.send([one.command for one in ahead], READ_TIMEOUT_S)
                if not ask.is_part:
                    came = connection.expect_bodies([size_of(key) for key in ask.keys], READ_TIMEOUT_S)
                    bodies += map(_checked_body, ask.keys, came)
                else:
                    whole = whole if ask.start else memory_of(size_of(ask.keys[0]))
                    connection.expect_body(whole[ask.start : ask.stop], READ_TIMEOUT_S)
                    if ask.stop == len(whole):
                        bodies.append(_checked_body(ask.keys[0], whole))
            except OtherReply as error:
                key = ask.keys[min(error.index, len(ask.keys) - 1)]
                raise _Unreadable(f"{ask.part or key} {_in_place_of_body(error.line)}") from error
            except (ConnectionLost, ReplyError) as error:
                raise _Unreadable(str(error)) from error
            self._turns.passed()
        return bodies

    def _renew(self) -> None:
        asked_at = time.monotonic()
        try:
            access = StoreAccess.checked(self._ask(self._turns.trouble))
        except (RolloutBufferError, OSError) as error:
            self._turns.not_answered(error, lost=not self._turns.is_good)
            return
        if access.relayed_because:
            self._use(None, None, None)
            self._turns.relayed(access, asked_at)
        elif self._access is not None and access.leads_where(self._access):
            self._access = access
            self._turns.taken(access, asked_at)
        else:
            self._connect(access, asked_at)

    def _connect(self, access: StoreAccess, asked_at: float) -> None:
        faults, began = [], time.monotonic()
        for place in access.places:
            try:
                connection = _connected(place, access)
            except (OSError, ValueError, ConnectionLost, OtherReply, ReplyError) as error:
                # ValueError: no name of a host.
                faults.append(f"{place}: {error}")
                continue
            self._use(access, connection, place)
            self._turns.taken(access, asked_at)
            return
        tried_s = time.monotonic() - began
        self._turns.failed("; ".join(faults), lost=not self._turns.is_good, tried_s=tried_s)

    def _leave(self, why: str) -> str:
        told = f"the store at {self._place}: {why}"
        self._use(None, None, None)
        self._turns.failed(told, lost=True)
        return told

    def _use(self, access: StoreAccess | None, connection: BlockingConnection | None, place: Place | None) -> None:
        if self._connection is not None:
            self._connection.close()
        self._access, self._connection, self._place = access, connection, place


class AsyncPayloadReader:
    """The reader for one event loop; see PayloadReader."""

    def __init__(
        self, run_id: str, client_id: str, ask: Callable[[str], Awaitable[payloads_pb2.PayloadAccess]]
    ) -> None:
        self._run_id = run_id
        self._way = AsyncWay(f"{client_id}, reading of run {run_id},", ask)

    @property
    def trouble(self) -> str:
        """Reason why the reader could not use what the service gave it last; empty where it could."""
        return self._way.trouble

    async def open(self) -> bool:
        """Get access and connect where that is due. True: pull with `direct`; False: the service relays at present."""
        return await self._way.opened() is not None

    async def read(self, keys: Sequence[str]) -> list[memoryview]:
        """The groups under the keys, in order, each checked. Waits at most READ_TIMEOUT_S for each portion or part.

        Raises PayloadsUnreadable, after which `open` says False for a while.
        """
        _check_keys(self._run_id, keys)
        way = await self._way.opened()
        if way is None:
            raise PayloadsUnreadable(self.trouble or "the service relays")
        connection = way[1]
        try:
            return await self._read(connection, _asks(keys, ASYNC_PORTION_BYTES))
        except WayLost as error:
            raise PayloadsUnreadable(self.trouble) from error
        except _Unreadable as error:
            self._way.leave(connection, str(error))
            raise PayloadsUnreadable(self.trouble) from error

    async def close(self) -> None:
        """Close the connection; reads under way raise PayloadsUnreadable."""
        await self._way.close()

    async def _read(self, connection: RespConnection, asks: list["_Ask"]) -> list[memoryview]:
        def begin(ask: "_Ask") -> asyncio.Task[object]:
            return asyncio.create_task(self._way.answered(connection, ask.command, READ_TIMEOUT_S))

        bodies: list[memoryview] = []
        whole = memory_of(0)
        begun = deque(map(begin, asks[:2]))
        try:
            for index, ask in enumerate(asks):
                came = await begun[0]
                begun.popleft()
                # While one is received and checked the store makes the next one ready.
                begun.extend(map(begin, asks[index + 2 : index + 3]))
                if ask.is_part:
                    whole = whole if ask.start else memory_of(size_of(ask.keys[0]))
                    ask.fill(whole, came)
                    if ask.stop == len(whole):
                        bodies.append(_checked_body(ask.keys[0], whole))
                elif isinstance(came, list) and len(came) == len(ask.keys):
                    bodies += map(_checked_body, ask.keys, came)
                else:
                    raise _Unreadable(f"MGET is answered {came!r:.200}")
        finally:
            for task in begun:
                task.cancel()
            await asyncio.gather(*begun, return_exceptions=True)
        return bodies


@dataclass(frozen=True, slots=True)
class _Ask:
    """One command: for several payloads whole, or for a part of one, which is its bytes [start, stop)."""

    command: Parts
    keys: Sequence[str]
    part: str = ""
    start: int = 0
    stop: int = 0

    @property
    def is_part(self) -> bool:
        return bool(self.part)

    def fill(self, whole: memoryview, came: object) -> None:
        """Put what came in its place."""
        if came is None:
            raise _Unreadable(f"{self.part} is not there")
        if not isinstance(came, Buffer) or len(came) != self.stop - self.start:
            raise _Unreadable(f"{self.part} is answered {came!r:.200}")
        whole[self.start : self.stop] = came


def _asks(keys: Sequence[str], portion_bytes: int) -> list[_Ask]:
    """Commands for the payloads in order: MGETs of portions, and a GET for each part of a payload in parts."""
    asks: list[_Ask] = []
    for portion in portions(keys, portion_bytes):
        if not parts_of(portion[0]):
            asks.append(_Ask(("MGET", *portion), portion))
            continue
        start = 0
        for part in part_keys(portion[0]):
            asks.append(_Ask(("GET", part.key), portion, part.key, start, start + part.size))
            start += part.size
    return asks


class _Unreadable(Exception):
    """Reason why a read fails."""


def _check_keys(run_id: str, keys: Sequence[str]) -> None:
    for key in keys:
        if not is_key_of(run_id, key):
            raise PayloadsUnreadable(f"{key!r:.200} is not the key of a payload of run {run_id}")


def _checked_body(key: str, body: object) -> memoryview:
    if body is None:
        raise _Unreadable(f"{key} is not there")
    if not isinstance(body, Buffer):
        raise _Unreadable(f"{key} is answered {body!r:.200}")
    if not is_of(key, body):
        differs = "fails its checksum" if len(body) == size_of(key) else f"has {len(body)} bytes"
        raise _Unreadable(f"{key} {differs}")
    return memoryview(body).toreadonly()


def _in_place_of_body(line: str) -> str:
    size = line.removeprefix("$")
    if size == "-1":
        return "is not there"
    return f"has {size} bytes" if size.isdigit() else f"is answered {line!r}"


def _connected(place: Place, access: StoreAccess) -> BlockingConnection:
    if place.unix_path:
        connection = BlockingConnection.to_unix(place.unix_path, CONNECT_TIMEOUT_S)
    else:
        tls = access.authorities if place.tls else None
        connection = BlockingConnection.to_host(place.host, place.port, tls, CONNECT_TIMEOUT_S)
    try:
        connection.send(access.greeting(), CONNECT_TIMEOUT_S)
        connection.expect_ok(len(access.greeting()), CONNECT_TIMEOUT_S)
    except BaseException:
        connection.close()
        raise
    return connection
