"""RedisRunStore: domain.ports.RunStore on Redis or Valkey."""

import asyncio
import contextlib
from pathlib import Path
from typing import Self

from buffer_service.store.batch_ops import BatchOps
from buffer_service.store.control_ops import ControlOps
from buffer_service.store.eval_ops import EvaluationOps
from buffer_service.store.housekeeping import Housekeeping
from buffer_service.store.inspect_ops import InspectOps
from buffer_service.store.notifications import StoreNotifications
from buffer_service.store.recent import RecentPayloads
from buffer_service.store.suitability import check_layout, check_suitable
from buffer_service.store.task_ops import TaskOps
from buffer_service.store.transport.connection import StoreConnection
from buffer_service.store.transport.meter import CallMeter


class RedisRunStore(TaskOps, BatchOps, InspectOps, ControlOps, EvaluationOps, Housekeeping):
    """Runs, tasks, groups, batches and weights on one store.

    Use `connect`; `close` ends its tasks and connections. Every decision is one script on the store (lua/), so any
    number of replicas may work on the same run.
    """

    def __init__(self, connection: StoreConnection, recent: RecentPayloads) -> None:
        super().__init__(connection, recent)
        self.notifications = StoreNotifications(connection.primary)
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def connect(
        cls,
        store: str,
        *,
        ca: Path | None = None,
        embedded: bool = False,
        timeout_s: float = 30.0,
        recent_bytes: int = 0,
        meter: CallMeter | None = None,
    ) -> Self:
        """Connect to an address (store/address.py), with TLS by the authorities in `ca` or the system's. Payloads that
        were just pushed here are kept for pulls, up to `recent_bytes`. `meter` is told of every call. `embedded`: the
        service's own, which it has refuse writes where its disk has no room (supervisor/disk.py).

        Raises StoreUnavailable, StoreUnsuitable.
        """
        connection = StoreConnection(store, ca=ca, embedded=embedded, timeout_s=timeout_s, meter=meter)
        try:
            await check_suitable(connection)
            await connection.open()
        except BaseException:
            await connection.close()
            raise
        self = cls(connection, RecentPayloads(recent_bytes))
        self._tasks = [
            asyncio.create_task(self.notifications.listen(), name="store-notifications"),
            asyncio.create_task(connection.primary.watch(), name="store-primary"),
        ]
        return self

    async def check_layout(self) -> None:
        """Raises LayoutChanged once a service of another version has taken the store over; StoreUnavailable."""
        await check_layout(self._connection)

    async def close(self) -> None:
        """See domain.ports.RunStore.close."""
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._connection.close()
