"""PayloadWriter: a worker writes the groups that it made to the store, where the service lets it."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from buffer_wire.codec import Buffer
from buffer_wire.payloads.nodes import OpenWay
from buffer_wire.payloads.parts import NewPayload
from buffer_wire.payloads.way import AsyncWay, WayLost
from buffer_wire.resp.encoding import flat
from rollout_buffer.v1 import groups_pb2, payloads_pb2

WRITE_TIMEOUT_S = 15.0
"""Longest wait for the store's answer to one write, of a payload or a part; then the service relays the group."""
TRIES = 2
"""Times that one payload is written at most: a cluster may have other primaries by the second."""
PARTS_UNDER_WAY = 4
"""Parts of one payload whose writes are unanswered at most: the store takes one while others are sent."""


class PayloadWriter:
    """Writer of one run's payloads, for the event loop in which it is used.

    `client_id` names it in logs. `ask` calls GetWriteAccess with the trouble it is given. It may raise any error of the
    contract, which has the service relay. Nothing is asked for before the first write.
    """

    def __init__(
        self, run_id: str, client_id: str, ask: Callable[[str], Awaitable[payloads_pb2.PayloadAccess]]
    ) -> None:
        self._run_id = run_id
        self._way = AsyncWay(f"{client_id}, writing for run {run_id},", ask)

    @property
    def direct(self) -> bool:
        """True while payloads go directly."""
        return self._way.is_open

    @property
    def trouble(self) -> str:
        """Reason why the writer could not use what the service gave it last; empty where it could."""
        return self._way.trouble

    async def write(self, header: bytes, payload: Buffer | Sequence[Buffer]) -> groups_pb2.StoredPayload | None:
        """Write the group of a serialized header and a payload, whole or in pieces, under a new key.

        None: push the group with its payload, for it is small, or cannot be written at present. Waits at most
        WRITE_TIMEOUT_S for each part, at the first write also for access and connection, and all twice on a cluster
        that changes. The pieces may not change before it returns.
        """
        pieces = [flat(piece) for piece in ([payload] if isinstance(payload, Buffer) else payload)]
        size = len(header) + sum(map(len, pieces))
        for _ in range(TRIES):
            way = await self._way.opened()
            if way is None or size < way.access.direct_from_bytes:
                return None
            new = NewPayload.of(self._run_id, header, pieces, in_parts=way.access.max_group_bytes > 0)
            with contextlib.suppress(WayLost):
                await self._write(way, new)
                return new.stored
        return None

    async def _write(self, way: OpenWay, new: NewPayload) -> None:
        if not new.stored.parts:
            await self._set(way, new.key, tuple(new.pieces))
            return
        under_way: deque[asyncio.Task[None]] = deque()
        try:
            for part, body in new.cut():
                under_way.append(asyncio.create_task(self._set(way, part.key, body), name="payload-part"))
                if len(under_way) == PARTS_UNDER_WAY:
                    await under_way.popleft()
            while under_way:
                await under_way.popleft()
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    async def _set(self, way: OpenWay, key: str, body: tuple[Buffer, ...]) -> None:
        command = ("SET", key, body, "NX", "PX", way.access.unpushed_ms)
        if (reply := await self._way.answered(way, command, WRITE_TIMEOUT_S)) != b"OK":
            # A key that is there is not this writer's: it draws a new one for every write.
            self._way.leave(way, key, f"SET of a new key was answered {reply!r}")
            raise WayLost

    async def close(self) -> None:
        """Close the connections; writes under way return None."""
        await self._way.close()
