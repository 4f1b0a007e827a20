"""ClusterIndex: scripts and commands of runs that are spread over the shards of a cluster.

Invariants: each goes to the primary of its slot, and again only when it certainly did not run. What was acknowledged of
a run, and its policy, is known by the process, not by a connection: the run may move.
"""

import asyncio
import hashlib
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from buffer_service.domain.command import Command
from buffer_service.domain.ops import Buffer
from buffer_service.store.keys import IN_CLUSTER, index_key
from buffer_service.store.payloads.node import Node, Traffic
from buffer_service.store.payloads.shards import Errand, Shards
from buffer_service.store.scripts import load_scripts
from buffer_service.store.suitability import check_scripts, fields_of
from buffer_service.store.transport.claims import Claims
from buffer_service.store.transport.connection import Shared, StoreConnection
from buffer_service.store.transport.meter import CallMeter, NoMeter, measured
from buffer_service.store.transport.refusals import Refusals
from buffer_service.store.transport.replication import Replication, Wanted
from buffer_wire.errors import StoreFault, StoreUnavailable
from buffer_wire.resp.encoding import Part
from buffer_wire.resp.protocol import RespConnection
from buffer_wire.resp.slots import slot_of

_KEY_AT = {"EVAL": 3}
"""Place of the key in a command, where it is not the second word."""


class ClusterIndex:
    """Implements Index on the shards of a cluster; `shards` are those that payloads lie on too."""

    names = IN_CLUSTER
    is_spread = True

    def __init__(self, shards: Shards, *, timeout_s: float = 30.0, meter: CallMeter | None = None) -> None:
        self.address = shards.address
        self.name = shards.address.shown
        self._shards = shards
        self._timeout_s = timeout_s
        self._meter = meter or NoMeter()
        claims = Claims(Refusals(self.name, embedded=False), load_scripts(apart=True)["claim"])
        self._shared = Shared(claims, Replication(self._command))
        self._connections: WeakKeyDictionary[Node, StoreConnection] = WeakKeyDictionary()

    async def check(self) -> None:
        """Raises StoreUnsuitable for servers whose scripts lack something, or with another layout; StoreUnavailable."""
        await check_scripts(self)

    async def run(self, command: Command[Any], *arguments: bytes) -> Buffer:
        """See Index.run."""
        slot = slot_of(index_key(command.run_id, "run"))
        return await self._shards.at(slot, lambda node: self._run_at(node, command, arguments))

    async def wanted(self, run_id: str) -> Wanted:
        """See Index.wanted."""
        return await self._shared.replication.wanted(run_id)

    async def tenure(self) -> str:
        """Terms of all primaries that are known: any failover is another one."""
        terms = ",".join(sorted(node.tenure for node in self._shards.nodes()))
        return hashlib.sha256(terms.encode()).hexdigest()[:32]

    async def existing(self, run_ids: Sequence[str]) -> list[str]:
        """See Index.existing. A run whose shard is away may exist."""
        keys = [index_key(run_id, "run") for run_id in run_ids]
        errands = [Errand(key, [("EXISTS", key)]) for key in keys]
        await self._shards.run(Traffic.COMMANDS, errands, patience_s=0)
        return [run_id for run_id, its in zip(run_ids, errands, strict=True) if its.failure or its.replies[0]]

    async def infos(self) -> list[dict[str, str]]:
        """See Index.infos; of the primaries that answer."""
        asked = (node.ask(Traffic.COMMANDS, [("INFO",)]) for node in self._shards.nodes())
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        found = [fields_of(outcome[0]) for outcome in outcomes if not isinstance(outcome, BaseException)]
        if not found:
            raise next((why for why in outcomes if isinstance(why, StoreFault)), self._nobody())
        return found

    async def command(self, *parts: Part) -> Any:  # noqa: ANN401 - replies are of any type
        """See Index.command."""
        return await measured(self._meter, "command", self._command(*parts))

    async def connect(self, on_push: Callable[[Any], None] | None = None) -> RespConnection:
        """See Index.connect. What one node is told goes to all of them."""
        nodes = self._shards.nodes()
        if not nodes:
            raise self._nobody()
        return await random.choice(nodes).primary.connect(on_push)  # noqa: S311 - spreads the load

    async def open(self) -> None:
        """See Index.open. Each node learns the scripts with its first call."""

    async def close(self) -> None:
        """See Index.close. The connections are the nodes'."""

    async def _command(self, *parts: Part) -> Any:  # noqa: ANN401
        if len(parts) == 1:
            return (await self._anybody().ask(Traffic.COMMANDS, [parts]))[0]
        errand = Errand(str(parts[_KEY_AT.get(str(parts[0]), 1)]), [parts])
        await self._shards.run(Traffic.COMMANDS, [errand])
        if errand.failure:
            raise errand.failure
        return errand.replies[0]

    async def _run_at(self, node: Node, command: Command[Any], arguments: Sequence[bytes]) -> Buffer:
        connection = self._connections.get(node)
        if connection is None:
            write = partial(_own_write, node.own_key)
            connection = self._connections[node] = StoreConnection(
                node.primary, timeout_s=self._timeout_s, meter=self._meter, apart=True, shared=self._shared, write=write
            )
        await connection.reach()
        return await connection.run(command, *arguments)

    def _anybody(self) -> Node:
        """A node that answered the last time it was asked, or else any."""
        nodes = self._shards.nodes()
        if not nodes:
            raise self._nobody()
        return next((node for node in nodes if node.away is None), nodes[0])

    def _nobody(self) -> StoreUnavailable:
        return StoreUnavailable(self.name, "nobody serves any slot")


def _own_write(own_key: Callable[[], str]) -> tuple[str, str, str]:
    return "SET", own_key(), ""
