"""Topology of a cluster: which primary serves which slots, as the nodes say it to redis-py's cluster client.

The client moves no payload. Invariants: of several who ask at the same time one asks the nodes for all, after they have
come. A slot that a node has said is elsewhere is there for SAID_S, whatever a node that does not know it yet answers.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.exceptions import RedisClusterException, RedisError

from buffer_service.store.address import Address
from buffer_service.store.primary import consume_failure, options_of_asking
from buffer_wire.errors import StoreUnavailable, StoreUnsuitable
from buffer_wire.resp.slots import SLOTS, slot_of

SAID_S = 1.0
"""Time, in seconds, after which all nodes know of a slot that has moved."""

Place: TypeAlias = tuple[str, int]
"""Host and port of a node."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A range of slots, first to last, and the nodes that have its keys."""

    first: int
    last: int
    primary: Place
    replicas: Sequence[Place]


class Topology:
    """Shards of one cluster as they were when last asked for."""

    def __init__(self, address: Address) -> None:
        self._address = address
        # Only what asks for the slots: the client itself would read all commands of the server too.
        self._nodes: Any = _client(address).nodes_manager
        self._said: dict[int, tuple[float, Place]] = {}
        self._question: asyncio.Task[None] | None = None
        self._map: Mapping[int, Sequence[Any]] = {}
        """The map of slots that `_shards` was made of."""
        self._shards: list[Shard] = []

    def primary_of(self, slot: int) -> Place | None:
        """Primary that serves a slot; None when no node says that anybody does."""
        said = self._said.get(slot)
        if said is not None:
            if said[0] > time.monotonic():
                return said[1]
            del self._said[slot]
        nodes = self._nodes.slots_cache.get(slot)
        return (nodes[0].host, nodes[0].port) if nodes else None

    def key_at(self, place: Place) -> str:
        """A key in a slot that a primary serves. Raises StoreUnavailable when it serves none."""
        for number in range(SLOTS):
            key = f"rb:replicated:{{{number}}}"
            if self.primary_of(slot_of(key)) == place:
                return key
        raise StoreUnavailable(self._address.at(*place).shown, "it serves no slots any more")

    def primaries(self) -> set[Place]:
        """All primaries that serve a slot."""
        now = time.monotonic()
        said = {place for until, place in self._said.values() if until > now}
        return {shard.primary for shard in self.shards()} | said

    def shards(self) -> list[Shard]:
        """Ranges of slots in order, without those that nobody serves."""
        slots = self._nodes.slots_cache
        # Each answer of the nodes is a new map.
        if slots is not self._map:
            self._map, self._shards = slots, _ranges(slots)
        return self._shards

    def has_moved(self, slot: int, place: Place) -> None:
        """Note what a node has said: the slot is served there."""
        self._said[slot] = time.monotonic() + SAID_S, place

    async def refresh(self) -> None:
        """Ask the nodes. Raises StoreUnavailable, StoreUnsuitable."""
        before = self._question
        if before is not None and not before.done():
            # Its answer may be from before the caller knew better.
            await asyncio.wait([before])
        if self._question is None or self._question.done():
            # Never cancelled: a cancellation may get lost in redis-py. It ends by its time-outs.
            self._question = asyncio.create_task(self._ask(), name="payload-topology")
            self._question.add_done_callback(consume_failure)
        await asyncio.shield(self._question)

    async def close(self) -> None:
        """End the connections that it asks over."""
        if self._question is not None:
            await asyncio.wait([self._question])
        for cache in ("nodes_cache", "startup_nodes"):
            await self._nodes.aclose(cache)

    async def _ask(self) -> None:
        try:
            await self._nodes.initialize()
        except (RedisError, RedisClusterException, OSError, IndexError) as error:
            why = str(error)
            if "Cluster mode is not enabled" in why:
                raise StoreUnsuitable(self._address.shown, "its servers do not run in cluster mode") from error
            raise StoreUnavailable(self._address.shown, why) from error


def _ranges(slots: Mapping[int, Sequence[Any]]) -> list[Shard]:
    shards: list[Shard] = []
    first, last = 0, None
    for slot in range(SLOTS + 1):
        nodes = slots.get(slot)
        # Slots of one range share their list.
        if nodes is last:
            continue
        if last:
            primary, *replicas = [(node.host, node.port) for node in last]
            shards.append(Shard(first, slot - 1, primary, replicas))
        first, last = slot, nodes
    return shards


def _client(address: Address) -> Any:  # noqa: ANN401 - redis-py says little of its types
    options = options_of_asking(address, address.username, address.password)
    nodes = [ClusterNode(host, port) for host, port in address.nodes]
    return RedisCluster(startup_nodes=nodes, require_full_coverage=False, **options)
