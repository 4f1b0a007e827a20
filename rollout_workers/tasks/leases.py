"""Leases of one sink for one engine: the requests for them, the work on each, and the way back of what is not begun.

Invariants: a request has a name, under which it is repeated until it is answered, and so grants the same leases; a
repeat names the weights that the first try named; a lease is in `works` from its beginning to its end, and so long its
heartbeats go out.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from math import floor, fsum

import structlog

from buffer_wire.errors import RolloutBufferError
from rollout_buffer.v1 import tasks_pb2
from rollout_workers.counters import describe
from rollout_workers.service.client import ServiceClient
from rollout_workers.slots.slot import EngineSlot
from rollout_workers.tasks.keeper import LeaseKeeper
from rollout_workers.tasks.tools import Tools
from rollout_workers.tasks.work import Stage, Work
from rollout_workers.tracing.attempt import trace_of
from rollout_workers.versions import Version

MAX_PER_REQUEST = 256
_UNSEEN_S = 2.0
_SLACK = 1e-6
"""Part of a group by which a sum of shares may be off."""
_log = structlog.get_logger()


class EngineLeases:
    """Leases of one sink that an engine holds. `name` begins the names of its requests.

    `would_load`: replies are to say which weights an evaluation wants.
    """

    def __init__(
        self,
        slot: EngineSlot,
        service: ServiceClient,
        keeper: LeaseKeeper,
        tools: Tools,
        *,
        name: str,
        sink: "tasks_pb2.TaskSink.ValueType" = tasks_pb2.TASK_SINK_QUEUE,
        would_load: bool = False,
    ) -> None:
        self._slot = slot
        self._service = service
        self._keeper = keeper
        self._tools = tools
        self._name = name
        self._sink = sink
        self._would_load = would_load
        self._requests = 0
        self._asked_at = 0.0
        self._named: Version | None = None
        self._each = 1.0 + tools.surplus_samples
        """Room that a group takes that begins: above 1 with surplus samples. At first as if groups had one sample."""
        self.works: dict[str, Work] = {}

    @property
    def named(self) -> Version | None:
        """Weights that the last request named; None once that is `answered`."""
        return self._named

    @property
    def running(self) -> float:
        """Groups on the engine, each by the share of its samples that still run."""
        return fsum(work.running for work in self.works.values())

    @property
    def generating(self) -> int:
        """Groups on the engine."""
        return sum(work.on_engine for work in self.works.values())

    def room(self, groups: float) -> int:
        """Groups that may begin where so many may run at once; each takes as much as the last one that did.

        Where nothing runs one may begin whose surplus samples have no room.
        """
        running = self.running
        begin = floor((groups - running + _SLACK) / self._each)
        return max(begin, 1) if not running and groups + _SLACK >= 1 else begin

    async def ask(self, max_tasks: int, wait_s: float) -> tasks_pb2.LeaseTasksResponse:
        """Request leases, or repeat the request that was not answered. Raises RolloutBufferError.

        The caller begins the leases or hands them back, and says so with `answered`.
        """
        if self._named is None:
            self._requests += 1
            self._named = self._slot.loaded
        self._asked_at = time.monotonic()
        return await self._service.lease(
            self._slot.engine_id,
            f"{self._name}{self._requests}",
            self._named,
            max_tasks=max_tasks,
            wait_s=wait_s,
            sink=self._sink,
            would_load=self._would_load,
        )

    def answered(self) -> None:
        """Begin another request with the next `ask`."""
        self._named = None

    def begin(
        self,
        group: asyncio.TaskGroup,
        lease: tasks_pb2.Lease,
        *,
        on_freed: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        """Work on a lease of the last reply, in a task of its own."""
        trace = trace_of(self._tools.traces, lease, self._slot, time.monotonic() - self._asked_at)
        work = Work(lease, self._slot, self._tools, trace=trace, give_back=self._give_back, on_freed=on_freed)
        self.works[lease.lease_id] = work
        self._each = work.running
        self._keeper.hold(lease, self._asked_at, work.ended)
        group.create_task(self._see_through(work, on_end), name=f"work {lease.lease_id}")

    def cut(self, *stages: Stage) -> None:
        """Have the work in these stages handed back as it is."""
        for work in list(self.works.values()):
            if work.stage in stages:
                work.cut()

    async def hand_back(self, leases: Sequence[tasks_pb2.Lease]) -> None:
        """Hand back leases on which no work was begun. Raises RolloutBufferError."""
        returns = [
            tasks_pb2.LeaseReturn(lease_id=lease.lease_id, kind=tasks_pb2.RETURN_KIND_INTERRUPTED)
            for lease in leases
            if lease.lease_id not in self.works
        ]
        if returns:
            await self._service.give_back(self._slot.engine_id, returns)

    async def return_unseen(self) -> None:
        """Hand back at once whatever a request that was cut off granted, or grants now."""
        if self._named is None:
            return
        try:
            async with asyncio.timeout(_UNSEEN_S):
                await self.hand_back((await self.ask(1, 0.0)).leases)
        except (RolloutBufferError, TimeoutError) as error:
            _log.warning("leases of the last request expire by themselves", error=describe(error))

    async def _see_through(self, work: Work, on_end: Callable[[], None]) -> None:
        try:
            await work.run()
        finally:
            self._keeper.release(work.lease.lease_id)
            del self.works[work.lease.lease_id]
            on_end()

    async def _give_back(self, lease_return: tasks_pb2.LeaseReturn) -> "tasks_pb2.ReturnOutcome.ValueType":
        return (await self._service.give_back(self._slot.engine_id, [lease_return])).outcomes[0]
