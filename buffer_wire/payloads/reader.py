"""Readers of payloads: a trainer reads the groups of its batch from the store, where the service lets it.

Both check every group against its key. What is missing or wrong raises PayloadsUnreadable; then the caller has the
service relay the batch, and check it.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence

from buffer_wire.errors import RolloutBufferError
from buffer_wire.payloads.access import Place, StoreAccess
from buffer_wire.payloads.arrivals import Arrival, arrivals_of
from buffer_wire.payloads.asks import Ask, Unreadable, ahead, asks_for, in_place_of_body
from buffer_wire.payloads.keys import PORTION_BYTES as ASYNC_PORTION_BYTES
from buffer_wire.payloads.keys import is_key_of
from buffer_wire.payloads.nodes import CONNECT_TIMEOUT_S, OpenWay
from buffer_wire.payloads.turns import Turns
from buffer_wire.payloads.way import AsyncWay, WayLost
from buffer_wire.resp.blocking import BlockingConnection, memory_of
from buffer_wire.resp.errors import ConnectionLost, OtherReply, ReplyError
from rollout_buffer.v1 import payloads_pb2

PORTION_BYTES = 8 << 20
"""Largest number of bytes of payloads that the blocking reader receives into one piece of memory.

In small pieces the faults of their pages take more than half of the reader's CPU.
"""
READ_TIMEOUT_S = 15.0
"""Longest wait for the store's answer to one portion of a batch."""
TRIES = 2
"""Times that a batch is read at most: a cluster may have other primaries by the second."""


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
        self._nodes: list[tuple[Place, BlockingConnection]] = []
        """Place and connection of each of its shards."""

    @property
    def trouble(self) -> str:
        """Reason why the reader could not use what the service gave it last; empty where it could."""
        return self._turns.trouble

    def open(self) -> bool:
        """Get access and connect where that is due. True: pull with `direct`; False: the service relays at present.

        Never raises for faults of store or service. Waits for `ask`, and at most CONNECT_TIMEOUT_S for each address.
        """
        with self._lock:
            return self._open()

    def read(self, keys: Sequence[str]) -> list[memoryview]:
        """The groups under the keys, in order, each checked. Waits at most READ_TIMEOUT_S for each 8 MiB.

        Raises PayloadsUnreadable, after which `open` says False for a while.
        """
        _check_keys(self._run_id, keys)
        with self._lock:
            try:
                return self._read_or_leave(keys)
            except PayloadsUnreadable:
                # Only a cluster, which may have other primaries, is opened again at once.
                if not self._open():
                    raise
            return self._read_or_leave(keys)

    def close(self) -> None:
        """Close the connections, once a read under way is over."""
        with self._lock:
            self._use(None, [])

    def _open(self) -> bool:
        if not all(connection.is_quiet for _, connection in self._nodes):
            self._use(None, [])
            self._turns.lapsed()
        if self._turns.is_due:
            self._renew()
        return bool(self._nodes) and self._turns.is_good

    def _read_or_leave(self, keys: Sequence[str]) -> list[memoryview]:
        try:
            return self._read(keys)
        except Unreadable as error:
            self._leave(error)
            raise PayloadsUnreadable(str(error)) from error

    def _read(self, keys: Sequence[str]) -> list[memoryview]:
        if self._access is None:
            raise Unreadable("not connected")
        asks = asks_for(keys, PORTION_BYTES, self._access)
        bodies: list[memoryview] = []
        arrivals: deque[Arrival] = deque()
        sent = 0
        for ask, until in zip(asks, ahead(asks, PORTION_BYTES), strict=True):
            self._send(asks[sent:until])
            sent = until
            if not ask.start:
                arrivals = deque(arrivals_of(ask.keys))
            with self._blamed(ask.shard):
                self._receive(ask, arrivals)
                whole = len(ask.keys) if not ask.part else 1 if ask.ends else 0
                bodies += [arrivals.popleft().checked() for _ in range(whole)]
        return bodies

    def _send(self, asks: Sequence[Ask]) -> None:
        for shard in dict.fromkeys(ask.shard for ask in asks):
            if shard < 0:
                raise Unreadable("nobody serves the slot of a payload", elsewhere=True)
            with self._blamed(shard):
                self._nodes[shard][1].send([ask.command for ask in asks if ask.shard == shard], READ_TIMEOUT_S)

    def _receive(self, ask: Ask, arrivals: Sequence[Arrival]) -> None:
        """Receive an ask's payloads, or its part of the first."""
        coming = [arrivals[0].part(ask.size)] if ask.part else arrivals
        try:
            self._nodes[ask.shard][1].expect_bodies(coming, READ_TIMEOUT_S, in_array=not ask.part)
        except OtherReply as error:
            key = ask.part or ask.keys[min(error.index, len(ask.keys) - 1)]
            raise Unreadable(f"{key} {in_place_of_body(error.line)}") from error
        self._turns.passed()

    @contextlib.contextmanager
    def _blamed(self, shard: int) -> Iterator[None]:
        try:
            yield
        except (Unreadable, ConnectionLost, ReplyError) as error:
            named = self._access.named(shard, self._nodes[shard][0]) if self._access is not None else ""
            raise Unreadable(f"{named}: {error}", elsewhere=not isinstance(error, Unreadable)) from error

    def _renew(self) -> None:
        asked_at = time.monotonic()
        try:
            access = StoreAccess.checked(self._ask(self._turns.trouble))
        except (RolloutBufferError, OSError) as error:
            self._turns.not_answered(error, lost=not self._turns.is_good)
            return
        if access.relayed_because:
            self._use(None, [])
            self._turns.relayed(access, asked_at)
        elif self._access is not None and access.logs_in_as(self._access) and access.shards == self._access.shards:
            self._access = access
            self._turns.taken(access, asked_at)
        else:
            self._connect(access, asked_at)

    def _connect(self, access: StoreAccess, asked_at: float) -> None:
        nodes: list[tuple[Place, BlockingConnection]] = []
        began = time.monotonic()
        for shard in range(len(access.shards)):
            node = _reached(access, shard)
            if isinstance(node, str):
                for _, connection in nodes:
                    connection.close()
                tried_s = time.monotonic() - began
                self._turns.failed(node, lost=not self._turns.is_good, tried_s=tried_s)
                return
            nodes.append(node)
        self._use(access, nodes)
        self._turns.taken(access, asked_at)

    def _leave(self, fault: "Unreadable") -> None:
        is_cluster = self._access is not None and self._access.is_cluster
        self._use(None, [])
        if is_cluster and fault.elsewhere:
            self._turns.strayed(str(fault))
        else:
            self._turns.failed(str(fault), lost=True)

    def _use(self, access: StoreAccess | None, nodes: list[tuple[Place, BlockingConnection]]) -> None:
        for _, connection in self._nodes:
            connection.close()
        self._access, self._nodes = access, nodes


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
        for _ in range(TRIES):
            way = await self._way.opened()
            if way is None:
                break
            try:
                return await self._read(way, keys)
            except WayLost:
                pass
            except Unreadable as error:
                raise PayloadsUnreadable(self.trouble) from error
        raise PayloadsUnreadable(self.trouble or "the service relays")

    async def close(self) -> None:
        """Close the connections; reads under way raise PayloadsUnreadable."""
        await self._way.close()

    async def _read(self, way: OpenWay, keys: Sequence[str]) -> list[memoryview]:
        def begin(ask: Ask) -> asyncio.Task[object]:
            return asyncio.create_task(self._way.answered(way, ask.command, READ_TIMEOUT_S))

        asks = asks_for(keys, ASYNC_PORTION_BYTES, way.access)
        bodies: list[memoryview] = []
        whole = memory_of(0)
        begun: deque[asyncio.Task[object]] = deque()
        sent = 0
        try:
            for ask, until in zip(asks, ahead(asks, ASYNC_PORTION_BYTES), strict=True):
                # While one is received and checked the store makes the next ones ready.
                begun.extend(map(begin, asks[sent:until]))
                sent = until
                came = await begun[0]
                begun.popleft()
                try:
                    whole = ask.take(came, whole, bodies)
                except Unreadable as error:
                    self._way.leave(way, str(ask.command[1]), str(error))
                    raise
        finally:
            for task in begun:
                task.cancel()
            await asyncio.gather(*begun, return_exceptions=True)
        return bodies


def _check_keys(run_id: str, keys: Sequence[str]) -> None:
    for key in keys:
        if not is_key_of(run_id, key):
            raise PayloadsUnreadable(f"{key!r:.200} is not the key of a payload of run {run_id}")


def _reached(access: StoreAccess, shard: int) -> tuple[Place, BlockingConnection] | str:
    """A new connection to a shard; or the reasons why there is none."""
    faults = []
    for place in access.shards[shard]:
        try:
            return place, _connected(place, access)
        except (OSError, ValueError, ConnectionLost, OtherReply, ReplyError) as error:
            # ValueError: no name of a host.
            faults.append(f"{access.named(shard, place)}: {error}")
    return "; ".join(faults)


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
