"""A primary of a cluster: its connections, and what makes its writes safe.

Invariants: a connection that is handed out leads to a primary that evicts nothing and serves its slots whatever becomes
of the others. A write counts once the replicas that are asked for have it, and the append-only file where there is one.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import structlog

from buffer_service.commands.replies import text
from buffer_service.store.address import Address
from buffer_service.store.primary import NAMED_TIMEOUT_S, Primary
from buffer_service.store.suitability import fields_of, refuse_classic_migration
from buffer_service.store.transport.exchange import Exchange
from buffer_service.store.transport.link import Link
from buffer_service.store.transport.refusals import NotRun, Refusals
from buffer_service.store.transport.replication import Waits, Wanted
from buffer_service.store.transport.shared_calls import SharedCalls
from buffer_wire.errors import StoreFault, StoreUnavailable, StoreUnsuitable
from buffer_wire.resp.encoding import Parts
from buffer_wire.resp.errors import ConnectionLost, ReplyError
from buffer_wire.resp.protocol import RespConnection

BRIEF_S = 2.0
"""Longest wait, in seconds, for the answer to a deletion: another one comes soon."""
AWAY_S = 1.0
"""Time, in seconds, for which deletions do not try a node again that could not be reached."""

COVERAGE = "cluster-require-full-coverage"

log = structlog.get_logger(__name__)


class Traffic(Enum):
    """Purpose of a connection: large bodies would hold others up."""

    WRITES = "writes"
    READS = "reads"
    DELETIONS = "deletions"
    COMMANDS = "commands"


class Node:
    """One primary. `own_key` names a key in a slot that it serves."""

    def __init__(
        self, address: Address, timeout_s: float, own_key: Callable[[], str], *, decides: bool = False
    ) -> None:
        self.own_key = own_key
        self.name = address.shown
        self.tenure = ""
        """Term of the server as primary, as of the newest answer; empty before."""
        self.primary = _ClusterPrimary(address, decides=decides)
        self._refusals = Refusals(self.name, embedded=False)
        exchange = Exchange(self.primary, self._refusals, timeout_s)
        brief = Exchange(self.primary, self._refusals, BRIEF_S)
        self._links = {
            traffic: (Link(self.primary), brief if traffic is Traffic.DELETIONS else exchange) for traffic in Traffic
        }
        self._control = Link(self.primary)
        self._exchange = exchange
        self._waits = Waits(self.name, lambda: exchange.over(Link(self.primary)), lambda: ("SET", own_key(), ""))
        self._appended = SharedCalls(self._ask_whether_appended)
        self._away: tuple[float, StoreUnavailable] | None = None

    @property
    def away(self) -> StoreUnavailable | None:
        """Reason why the node cannot be reached, as far as the last try says; None when it could."""
        return self._away[1] if self._away is not None else None

    async def request(self, traffic: Traffic, commands: Sequence[Parts]) -> tuple[list[Any], RespConnection]:
        """Replies to commands, error replies among them, and the connection that they came over.

        Raises NotRun, and StoreUnavailable when it is not known what ran; StoreUnsuitable.
        """
        link, exchange = self._links[traffic]
        if traffic is Traffic.DELETIONS and self._away is not None and self._away[0] > time.monotonic():
            raise NotRun(self._away[1])
        try:
            connection = await link.get()
        except StoreUnavailable as error:
            self._away = time.monotonic() + AWAY_S, error
            raise NotRun(error) from error
        self.tenure = connection.tenure
        try:
            replies, at = await exchange.commands(link, commands)
        except StoreUnavailable as error:
            self._away = time.monotonic() + AWAY_S, error
            raise
        self._away = None
        return replies, at

    async def ask(self, traffic: Traffic, commands: Sequence[Parts]) -> list[Any]:
        """Replies to commands. Raises StoreFault, for an error reply too."""
        try:
            replies, _ = await self.request(traffic, commands)
        except NotRun as error:
            raise error.failure from error
        return [self.checked(reply) for reply in replies]

    async def look(self) -> None:
        """See whether it answers. Raises StoreUnavailable, StoreUnsuitable."""
        await self.ask(Traffic.DELETIONS, [("PING",)])

    async def memory(self) -> tuple[int, int] | tuple[None, None]:
        """Bytes that the server uses, and its maxmemory, 0 for none; None where it does not answer."""
        try:
            (info,) = await self.ask(Traffic.DELETIONS, [("INFO", "memory")])
        except StoreFault:
            return None, None
        found = fields_of(info)
        return int(found["used_memory"]), int(found.get("maxmemory", "0"))

    async def keep(self, wanted: Wanted, at: RespConnection) -> None:
        """Wait until what was written over a connection is where it must be.

        Raises NotReplicated, StoreOutOfDisk, StoreUnavailable.
        """
        if wanted.replicas:
            await self._waits.wait(wanted, at.server)
        if at.appends and await self._appended.answer() != at.server:
            raise StoreUnavailable(self.name, "it was started anew between a write and the look whether it is appended")

    def checked(self, reply: Any) -> Any:  # noqa: ANN401 - replies are of any type
        """The reply. Raises the error that an error reply stands for."""
        return self._refusals.checked(reply)

    def end(self, why: str) -> None:
        """End its connections."""
        self.primary.end(why)

    async def _ask_whether_appended(self) -> str:
        """See transport/confirmation.py."""
        (reply,), at = await self._exchange.commands(self._control, [("PING",)])
        self._refusals.checked(reply)
        return at.server


class _ClusterPrimary(Primary):
    """A primary that says it is one of a cluster, with settings that lose nothing."""

    def __init__(self, address: Address, *, decides: bool) -> None:
        super().__init__(address, connect_timeout_s=NAMED_TIMEOUT_S)
        self._decides = decides

    async def connect(self, on_push: Callable[[Any], None] | None = None) -> RespConnection:
        """See Primary.connect. Raises StoreUnsuitable too for a server with other settings."""
        connection = await super().connect(on_push)
        try:
            async with asyncio.timeout(NAMED_TIMEOUT_S):
                await self._check(connection)
        except BaseException as error:
            connection.abort("it is not used")
            if isinstance(error, (TimeoutError, ConnectionLost)):
                raise StoreUnavailable(self.address.shown, str(error) or "no answer in time") from error
            raise
        return connection

    async def _check(self, connection: RespConnection) -> None:
        shown = self.address.shown
        role, info, server, coverage = await connection.request(
            [("ROLE",), ("INFO", "cluster"), ("INFO", "server"), ("CONFIG", "GET", COVERAGE)]
        )
        if text(role[0]) != "master":
            raise StoreUnavailable(shown, f"it serves no slots: its role is {text(role[0])}")
        if fields_of(info).get("cluster_enabled") != "1":
            raise StoreUnsuitable(shown, "it does not run in cluster mode")
        if self._decides:
            refuse_classic_migration(shown, fields_of(server))
        if isinstance(coverage, ReplyError) or not coverage:
            log.warning("a node of a cluster does not tell a setting, which has to be no", server=shown, name=COVERAGE)
        elif text(coverage[1]) != "no":
            raise StoreUnsuitable(
                shown, f"{COVERAGE} is {text(coverage[1])}: with one shard all would be away; set it to no"
            )
