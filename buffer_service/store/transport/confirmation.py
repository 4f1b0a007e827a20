"""Confirmation: a reply is given once what it acknowledges is where it must be.

Invariants: what policy.wait_replicas asks for is there before an answer is; where there is an append-only file the
operating system has the write.
"""

from typing import Any

from buffer_service.commands.replies import head_of
from buffer_service.domain.command import Command
from buffer_service.domain.ops import Buffer
from buffer_service.store.transport.claims import Claims
from buffer_service.store.transport.exchange import Exchange
from buffer_service.store.transport.link import Link
from buffer_service.store.transport.refusals import Refusals
from buffer_service.store.transport.replication import Replication, Waits
from buffer_service.store.transport.shared_calls import SharedCalls
from buffer_wire.errors import StoreUnavailable
from buffer_wire.resp.protocol import RespConnection

_CHANGES_POLICY = frozenset({"create_run", "update_policy"})


class Confirmation:
    """Holds back the replies of one process."""

    def __init__(
        self,
        exchange: Exchange,
        control: Link,
        refusals: Refusals,
        replication: Replication,
        waits: Waits,
        claims: Claims,
    ) -> None:
        self._exchange = exchange
        self._control = control
        self._refusals = refusals
        self._replication = replication
        self._waits = waits
        self._claims = claims
        self._appended = SharedCalls(self._ask_whether_appended)

    async def kept(self, command: Command[Any], at: RespConnection, reply: Buffer) -> Buffer:
        """The reply that came over `at`, once what it acknowledges is where it must be; notes its revision.

        Raises NotReplicated, StoreOutOfDisk, StoreUnavailable.
        """
        run_id = command.run_id
        tag, then = head_of(reply)
        if tag == b"error":
            if then == b"unknown_run":
                self._claims.forget(run_id)
            return reply
        if command.script in _CHANGES_POLICY:
            self._replication.forget(run_id)
        if tag == b"created":
            # A run of that name may have been deleted before.
            self._claims.forget(run_id)
        wanted = await self._replication.wanted(run_id)
        if wanted.replicas:
            await self._waits.wait(wanted, at.server)
        if at.appends and await self._appended.answer() != at.server:
            raise StoreUnavailable(
                self._refusals.store, "it was started anew between a write and the look whether it is appended"
            )
        if command.script == "delete_run":
            # Nobody may ever ask for it again.
            self._claims.forget(run_id)
            self._replication.forget(run_id)
        elif isinstance(then, int):
            self._claims.note(run_id, then)
        return reply

    async def _ask_whether_appended(self) -> str:
        """Server that has handed all it has answered so far to the operating system. Raises StoreOutOfDisk.

        A server that may go on without its disk (all but `appendfsync always`) answers the writes whose append has just
        failed. It refuses whatever comes after until it has made up for it: writes, and this.
        """
        (reply,), at = await self._exchange.commands(self._control, [("PING",)])
        self._refusals.checked(reply)
        return at.server
