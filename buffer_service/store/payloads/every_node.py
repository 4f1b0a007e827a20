"""Every node of a cluster, replicas too, asked for itself: what a server knows of users it does not replicate."""

import asyncio
from typing import Any

from buffer_service.store.address import Address
from buffer_service.store.payloads.topology import Place, Topology
from buffer_service.store.primary import NAMED_TIMEOUT_S, Primary
from buffer_service.store.transport.link import Link
from buffer_service.store.transport.refusals import Refusals
from buffer_wire.errors import StoreUnavailable
from buffer_wire.resp.encoding import Parts
from buffer_wire.resp.errors import ConnectionLost

ANSWER_S = 2.0
"""Longest wait, in seconds, for one node's answer."""


class EveryNode:
    """Nodes of one cluster, as its topology names them."""

    def __init__(self, address: Address, topology: Topology) -> None:
        self._address = address
        self._topology = topology
        self._nodes: dict[Place, _Node] = {}

    async def ask(self, *command: str) -> list[Any]:
        """Replies of all nodes that answer. One that is away or new is asked the next time.

        Raises the refusal of a node, and StoreUnavailable when none answers.
        """
        there = {place for shard in self._topology.shards() for place in (shard.primary, *shard.replicas)}
        for place in self._nodes.keys() - there:
            self._nodes.pop(place).end()
        for place in there - self._nodes.keys():
            self._nodes[place] = _Node(self._address.at(*place))
        outcomes = await asyncio.gather(*(node.ask(command) for node in self._nodes.values()), return_exceptions=True)
        replies = []
        away = StoreUnavailable(self._address.shown, "nobody serves any slot")
        for outcome in outcomes:
            if isinstance(outcome, StoreUnavailable):
                away = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                replies.append(outcome)
        if not replies:
            raise away
        return replies

    def end(self) -> None:
        """End all connections."""
        for node in self._nodes.values():
            node.end()


class _Node:
    def __init__(self, address: Address) -> None:
        self._primary = Primary(address, connect_timeout_s=NAMED_TIMEOUT_S)
        self._link = Link(self._primary)
        self._refusals = Refusals(address.shown, embedded=False)
        self._name = address.shown

    async def ask(self, command: Parts) -> Any:  # noqa: ANN401 - replies are of any type
        try:
            connection = await self._link.get()
            async with asyncio.timeout(ANSWER_S):
                (reply,) = await connection.request([command])
        except (ConnectionLost, TimeoutError) as error:
            raise StoreUnavailable(self._name, str(error) or "no answer in time") from error
        return self._refusals.checked(reply)

    def end(self) -> None:
        self._primary.end("it is not asked any more")
