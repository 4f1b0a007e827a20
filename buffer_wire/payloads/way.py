"""The asyncio clients' way to the store: access, connection, and both again after a fault or before their time is over.

Invariants: of all callers one asks and connects. Callers wait for it while nothing is known to be wrong. After a fault
they go on at once, relayed. Every wait has a deadline. A renewal that needs another connection leaves the former one to
its unanswered requests.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from buffer_wire.errors import RolloutBufferError
from buffer_wire.payloads.access import Place, StoreAccess
from buffer_wire.payloads.turns import Turns
from buffer_wire.resp.encoding import Parts
from buffer_wire.resp.errors import ConnectionLost, ReplyError
from buffer_wire.resp.protocol import RespConnection
from rollout_buffer.v1 import payloads_pb2

ASK_TIMEOUT_S = 10.0
"""Longest wait for the service's answer."""
CONNECT_TIMEOUT_S = 2.0
"""Longest wait for a connection to one address of the store, greeting and TLS included."""


class WayLost(Exception):
    """The way ended under a request, and whether that ran is not known; the reason is noted already."""


class AsyncWay:
    """Way of one client. `who` names it in logs; `ask` asks the service for access, with the trouble of the last."""

    def __init__(self, who: str, ask: Callable[[str], Awaitable[payloads_pb2.PayloadAccess]]) -> None:
        self._ask = ask
        self._turns = Turns(who)
        self._way: tuple[StoreAccess, RespConnection] | None = None
        self._attempt: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self._place: Place | None = None
        self._closed = False

    @property
    def is_open(self) -> bool:
        """True while payloads can go directly."""
        return self._open() is not None

    @property
    def trouble(self) -> str:
        """Reason why the last access could not be used; empty where it could."""
        return self._turns.trouble

    async def opened(self) -> tuple[StoreAccess, RespConnection] | None:
        """Access and connection to use now; None while the service relays."""
        way = self._open()
        if self._turns.is_due and self._attempt is None and not self._closed:
            self._attempt = asyncio.create_task(self._renew(), name="payload-access")
        if way is None and self._attempt is not None and not self._turns.is_failing:
            # Not cancelled with its caller: others wait for it too.
            await asyncio.wait([self._attempt])
            way = self._open()
        return way

    async def answered(self, connection: RespConnection, command: Parts, timeout_s: float) -> Any:  # noqa: ANN401
        """The reply to a command, within `timeout_s` of its being sent. Raises WayLost for a lost connection, an error
        reply, and no answer in time.
        """
        # One at a time: what waits for room is not handed to the transport, which would copy it and keep it.
        async with self._turn:
            await connection.writable()
        late = asyncio.get_running_loop().call_later(timeout_s, connection.abort, f"no answer within {timeout_s:g} s")
        try:
            (reply,) = await connection.request([command])
        except ConnectionLost as error:
            self.leave(connection, str(error))
            raise WayLost from error
        finally:
            late.cancel()
        if isinstance(reply, ReplyError):
            self.leave(connection, str(reply))
            raise WayLost from reply
        self._turns.passed()
        return reply

    def leave(self, connection: RespConnection, why: str) -> None:
        """End a connection over which something went wrong, and have the service relay for a while."""
        connection.abort(why)
        # Requests under way on one connection fail together, and are one fault.
        if self._way is not None and self._way[1] is connection:
            self._way = None
            self._turns.failed(f"the store at {self._place}: {why}", lost=True)

    async def close(self) -> None:
        """End the connection and what is being tried."""
        self._closed = True
        if self._attempt is not None:
            self._attempt.cancel()
            await asyncio.wait([self._attempt])
        if self._way is not None:
            self._way[1].abort("closed by this side")
            self._way = None

    def _open(self) -> tuple[StoreAccess, RespConnection] | None:
        if self._way is None:
            return None
        connection = self._way[1]
        if connection.is_over:
            self._way = None
            self._turns.lapsed()
            return None
        return self._way if self._turns.is_good else None

    async def _renew(self) -> None:
        try:
            await self._take()
        finally:
            self._attempt = None

    async def _take(self) -> None:
        asked_at = time.monotonic()
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                message = await self._ask(self._turns.trouble)
            access = StoreAccess.checked(message)
        except (RolloutBufferError, OSError) as error:
            self._turns.not_answered(error, lost=self._open() is None)
            return
        present = self._open()
        if access.relayed_because:
            self._use(None)
            self._turns.relayed(access, asked_at)
        elif self._way is not None and present is not None and access.leads_where(present[0]):
            self._way = (access, present[1])
            self._turns.taken(access, asked_at)
        else:
            await self._connect(access, asked_at)

    async def _connect(self, access: StoreAccess, asked_at: float) -> None:
        faults = []
        for place in access.places:
            try:
                connection = await connected(place, access)
            except (OSError, ValueError, ConnectionLost, ReplyError) as error:
                # ValueError: no name of a host.
                faults.append(f"{place}: {str(error) or 'no answer in time'}")
                continue
            self._place = place
            self._use((access, connection))
            self._turns.taken(access, asked_at)
            return
        self._turns.failed("; ".join(faults), lost=self._open() is None)

    def _use(self, way: tuple[StoreAccess, RespConnection] | None) -> None:
        former, self._way = self._way, way
        if former is not None:
            former[1].finish()


async def connected(place: Place, access: StoreAccess) -> RespConnection:
    """A connection to a place that has let this user in. Raises OSError, ConnectionLost, ReplyError."""
    loop = asyncio.get_running_loop()
    connection: RespConnection | None = None
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            if place.unix_path:
                _, connection = await loop.create_unix_connection(RespConnection, place.unix_path)
            else:
                tls = access.authorities if place.tls else None
                _, connection = await loop.create_connection(RespConnection, place.host, place.port, ssl=tls)
            _check_welcome(await connection.request(access.greeting()))
            return connection
    except BaseException:
        if connection is not None:
            connection.abort("it did not get to work")
        raise


def _check_welcome(replies: Sequence[Any]) -> None:
    for reply in replies:
        if isinstance(reply, ReplyError):
            raise reply
