"""A connection that is made when it is needed, and made again after it was lost."""

import asyncio
import time

from buffer_service.store.primary import Primary
from buffer_wire.errors import StoreUnavailable
from buffer_wire.resp.protocol import RespConnection


class Link:
    """Link to the primary, of one connection at a time.

    Invariant: callers that wait together share one attempt to connect.
    """

    def __init__(self, primary: Primary) -> None:
        self._primary = primary
        self._connection: RespConnection | None = None
        self._connecting = asyncio.Lock()
        self._failure: StoreUnavailable | None = None
        self._failed_at = 0.0

    async def get(self) -> RespConnection:
        """The living connection. Raises StoreUnavailable, StoreUnsuitable."""
        connection = self._connection
        if connection is None or connection.is_over:
            came = time.monotonic()
            async with self._connecting:
                connection = self._connection
                if connection is None or connection.is_over:
                    if self._failure is not None and self._failed_at >= came:
                        # It was tried while this caller waited for its turn.
                        raise self._failure
                    connection = self._connection = await self._connect()
        return connection

    async def _connect(self) -> RespConnection:
        try:
            return await self._primary.connect()
        except StoreUnavailable as error:
            self._failure, self._failed_at = error, time.monotonic()
            raise
