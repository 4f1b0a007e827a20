"""Requests and their replies, each within a deadline; what certainly did not run is sent again."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from buffer_service.store.primary import Primary
from buffer_service.store.transport.link import Link
from buffer_service.store.transport.refusals import Refusals, is_elsewhere, unrun
from buffer_service.store.transport.replication import Send
from buffer_wire.errors import StoreUnavailable
from buffer_wire.resp.encoding import Parts
from buffer_wire.resp.errors import ConnectionLost
from buffer_wire.resp.protocol import RespConnection

LOADING_TIMEOUT_S = 10.0
LOADING_PAUSE_S = 0.05

Request: TypeAlias = Callable[[RespConnection], Awaitable[list[Any]]]
"""Sends something over a connection; its replies."""


class Exchange:
    """Sends requests to the primary of one store.

    Invariant: a request is never sent twice unless its first try certainly did not run; every wait has a deadline.
    """

    def __init__(self, primary: Primary, refusals: Refusals, timeout_s: float) -> None:
        self._primary = primary
        self._store = primary.address.shown
        self._refusals = refusals
        self._timeout_s = timeout_s

    async def commands(
        self, link: Link, commands: Sequence[Parts], longer_s: float = 0.0
    ) -> tuple[list[Any], RespConnection]:
        """Send commands in one write, and wait so many seconds more than usual; see `request`."""
        return await self.request(link, lambda connection: connection.request(commands), longer_s)

    def over(self, link: Link) -> Send:
        """A way to send commands: their replies come with the life of the server that answered."""

        async def send(commands: Sequence[Parts], longer_s: float) -> tuple[list[Any], str]:
            replies, at = await self.commands(link, commands, longer_s)
            return replies, at.server

        return send

    async def request(self, link: Link, request: Request, longer_s: float = 0.0) -> tuple[list[Any], RespConnection]:
        """The replies, and the connection that they came over. Raises StoreUnavailable.

        Commands that certainly did not run are sent again, for LOADING_TIMEOUT_S. Either the store loads its data, or
        it has become a replica and there are Sentinels that know the primary.
        """
        loop = asyncio.get_running_loop()
        timeout_s = self._timeout_s + longer_s
        until = loop.time() + LOADING_TIMEOUT_S
        while True:
            connection = await link.get()
            # The whole connection ends: later replies would wait behind the one that does not come. A timer costs half
            # of what asyncio.timeout does, and there is one for every call.
            late = loop.call_later(timeout_s, connection.abort, f"no answer within {timeout_s:g} s")
            try:
                replies = await request(connection)
            except ConnectionLost as error:
                raise StoreUnavailable(self._store, str(error)) from error
            finally:
                late.cancel()
            refusal = unrun(replies)
            if refusal is None:
                return replies, connection
            if is_elsewhere(refusal):
                self._primary.leave(connection, "it has become a replica")
                if self._primary.address.sentinels is None:
                    raise self._refusals.fault(refusal) from refusal
            if loop.time() > until:
                raise StoreUnavailable(self._store, f"it goes on to answer: {refusal}") from refusal
            await asyncio.sleep(LOADING_PAUSE_S)
