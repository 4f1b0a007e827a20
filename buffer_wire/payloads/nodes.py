"""Connections of an asyncio client to the servers of one access: one server, or the shards of a cluster."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from buffer_wire.payloads.access import Place, StoreAccess
from buffer_wire.resp.errors import ConnectionLost, ReplyError
from buffer_wire.resp.protocol import RespConnection

CONNECT_TIMEOUT_S = 2.0
"""Longest wait for a connection to one address of the store, greeting and TLS included."""


@dataclass(slots=True, eq=False)
class Node:
    """Connection to one server."""

    place: Place
    connection: RespConnection
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    left: bool = False
    """True once something went wrong over it."""

    @property
    def is_of_use(self) -> bool:
        """True while it can be taken over into the next way."""
        return not self.left and not self.connection.is_over

    def leave(self) -> None:
        """End it once what was sent over it is answered."""
        self.left = True
        self.connection.finish()


@dataclass(slots=True, eq=False)
class OpenWay:
    """Access in use, and a connection to each of its shards."""

    access: StoreAccess
    nodes: Sequence[Node]
    over: bool = False

    def named(self, node: Node) -> str:
        """The server as reasons name it."""
        return self.access.named(self.nodes.index(node), node.place)


async def reached_all(access: StoreAccess, kept: Sequence[Node]) -> list[Node | str]:
    """A connection to each shard, or why there is none; when it is cancelled, no new one is left."""
    tries = [asyncio.create_task(_reached(access, shard, kept)) for shard in range(len(access.shards))]
    try:
        return await asyncio.gather(*tries)
    except asyncio.CancelledError:
        for reached in await asyncio.gather(*tries, return_exceptions=True):
            if isinstance(reached, Node) and reached not in kept:
                reached.connection.abort("it is not needed any more")
        raise


async def _reached(access: StoreAccess, shard: int, kept: Sequence[Node]) -> Node | str:
    """A connection to a shard, kept or new; or the reasons why there is none."""
    places = access.shards[shard]
    for node in kept:
        if node.place in places:
            return node
    faults = []
    for place in places:
        try:
            return Node(place, await connected(place, access))
        except (OSError, ValueError, ConnectionLost, ReplyError) as error:
            # ValueError: no name of a host.
            faults.append(f"{access.named(shard, place)}: {str(error) or 'no answer in time'}")
    return "; ".join(faults)


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
