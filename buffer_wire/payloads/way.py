"""The asyncio clients' way to the store: access, connections, both again after a fault or before their time is over.

Invariants: of all callers one asks and connects. Callers wait for it while nothing is known to be wrong. After a fault
they go on at once, relayed; of a cluster they wait for one more access, which may name other primaries. Every wait has
a deadline. A renewal keeps the connections that are as good as new ones, and leaves the others to their unanswered
requests.
"""

import asyncio
import time
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

from buffer_wire.errors import RolloutBufferError
from buffer_wire.payloads.access import StoreAccess
from buffer_wire.payloads.nodes import Node, OpenWay, reached_all
from buffer_wire.payloads.turns import Turns
from buffer_wire.resp.encoding import Parts
from buffer_wire.resp.errors import ConnectionLost, ReplyError
from buffer_wire.resp.protocol import RespConnection
from rollout_buffer.v1 import payloads_pb2

ASK_TIMEOUT_S = 10.0
"""Longest wait for the service's answer."""


class WayLost(Exception):
    """The way ended under a request, and whether that ran is not known; the reason is noted already."""


class AsyncWay:
    """Way of one client. `who` names it in logs; `ask` asks the service for access, with the trouble of the last."""

    def __init__(self, who: str, ask: Callable[[str], Awaitable[payloads_pb2.PayloadAccess]]) -> None:
        self._ask = ask
        self._turns = Turns(who)
        self._way: OpenWay | None = None
        self._connections = weakref.WeakSet[RespConnection]()
        """Connections that were in use, also those left to their unanswered requests."""
        self._attempt: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def is_open(self) -> bool:
        """True while payloads can go directly."""
        return self._open() is not None

    @property
    def trouble(self) -> str:
        """Reason why the last access could not be used; empty where it could."""
        return self._turns.trouble

    async def opened(self) -> OpenWay | None:
        """The way to use now; None while the service relays."""
        way = self._open()
        if self._turns.is_due and self._attempt is None and not self._closed:
            self._attempt = asyncio.create_task(self._renew(), name="payload-access")
        if way is None and self._attempt is not None and not self._turns.is_failing:
            # Not cancelled with its caller: others wait for it too.
            await asyncio.wait([self._attempt])
            way = self._open()
        return way

    async def answered(self, way: OpenWay, command: Parts, timeout_s: float) -> Any:  # noqa: ANN401
        """The reply to a command, within `timeout_s` of its being sent; its first argument is a key, which says where
        it goes. Raises WayLost for a lost connection, an error reply, and no answer in time.
        """
        node = self._node(way, str(command[1]))
        # One at a time: what waits for room is not handed to the transport, which would copy it and keep it.
        if node.turn.locked() or not node.connection.is_writable:
            async with node.turn:
                await node.connection.writable()
        why = f"no answer within {timeout_s:g} s"
        late = asyncio.get_running_loop().call_later(timeout_s, node.connection.abort, why)
        try:
            (reply,) = await node.connection.request([command])
        except ConnectionLost as error:
            self._fault(way, node, str(error))
            raise WayLost from error
        finally:
            late.cancel()
        if isinstance(reply, ReplyError):
            self._fault(way, node, str(reply))
            raise WayLost from reply
        self._turns.passed()
        return reply

    def leave(self, way: OpenWay, key: str, why: str) -> None:
        """End the connection over which something went wrong with a key, and have the service relay for a while."""
        node = self._node(way, key)
        node.connection.abort(why)
        self._fault(way, node, why, elsewhere=False)

    async def close(self) -> None:
        """End the connections and what is being tried, also where it is cancelled meanwhile."""
        self._closed = True
        attempt = self._attempt
        if attempt is not None:
            attempt.cancel()
        for connection in list(self._connections):
            connection.abort("closed by this side")
        self._way = None
        if attempt is not None:
            # It ends the connections that it has just made, and uses none: it was cancelled.
            await asyncio.wait([attempt])

    def _node(self, way: OpenWay, key: str) -> Node:
        shard = way.access.shard_of(key)
        if shard < 0:
            self._over(way, f"nobody serves the slot of {key}", elsewhere=True)
            raise WayLost
        return way.nodes[shard]

    def _fault(self, way: OpenWay, node: Node, why: str, *, elsewhere: bool = True) -> None:
        node.leave()
        self._over(way, f"{way.named(node)}: {why}", elsewhere=elsewhere)

    def _over(self, way: OpenWay, why: str, *, elsewhere: bool) -> None:
        # Requests under way fail together, and are one fault.
        if way is not self._way or way.over:
            return
        way.over = True
        if elsewhere and way.access.is_cluster:
            self._turns.strayed(why)
        else:
            self._turns.failed(why, lost=True)

    def _open(self) -> OpenWay | None:
        way = self._way
        if way is None or way.over:
            return None
        if not all(node.is_of_use for node in way.nodes):
            way.over = True
            self._turns.lapsed()
            return None
        return way if self._turns.is_good else None

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
        if access.relayed_because:
            self._use(None)
            self._turns.relayed(access, asked_at)
            return
        former = self._way if self._way is not None and self._way.access.logs_in_as(access) else None
        kept = [node for node in former.nodes if node.is_of_use] if former is not None else []
        reached = await reached_all(access, kept)
        nodes = [node for node in reached if isinstance(node, Node)]
        if faults := [fault for fault in reached if isinstance(fault, str)]:
            for node in nodes:
                if node not in kept:
                    node.leave()
            self._turns.failed("; ".join(faults), lost=self._open() is None)
            return
        self._use(OpenWay(access, nodes))
        self._turns.taken(access, asked_at)

    def _use(self, way: OpenWay | None) -> None:
        former, self._way = self._way, way
        self._connections.update(node.connection for node in (way.nodes if way is not None else ()))
        for node in former.nodes if former is not None else ():
            if way is None or node not in way.nodes:
                node.leave()
