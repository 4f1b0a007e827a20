"""The RPC of stages: parse, call the store, encode. Errors are translated by the interceptor."""

import asyncio
from dataclasses import dataclass
from typing import Any

import grpc.aio

from buffer_service import commands
from buffer_service.domain import ops
from buffer_service.domain.ports import RunStore, Topic
from buffer_service.rpc.convert import fields
from buffer_service.rpc.flow.drain import Drain
from buffer_service.rpc.flow.waiting import WaitingLines
from buffer_wire.revision import Revision
from rollout_buffer.v1 import stages_pb2 as pb
from rollout_buffer.v1 import stages_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

MAX_GROUPS = 256


@dataclass(frozen=True, slots=True)
class StageServicer(stages_pb2_grpc.StageServiceServicer):
    """Servicer of stages. Requests stand in no line: what the head of one cannot use, another stage may."""

    store: RunStore
    lines: WaitingLines
    drain: Drain

    async def LeaseGroups(self, request: pb.LeaseGroupsRequest, _: Context) -> pb.LeaseGroupsResponse:
        """Lease groups that wait in a stage, waiting for the first."""
        run_id, seen = fields.run_ref(request.run)
        ask = ops.StageAsk(
            stage=fields.line(request.stage, "stage", 1, 32),
            worker_id=fields.name(request.worker_id, "worker_id"),
            instance_id=fields.line(request.instance_id, "instance_id", 1, 64),
            request_id=fields.line(request.request_id, "request_id", 1, 64),
            max_groups=fields.number(request.max_groups, "max_groups", 1, MAX_GROUPS),
        )
        wait_s = fields.number(request.wait_ms, "wait_ms", 0, 60_000) / 1000
        self.drain.refuse()
        return fields.reply(pb.LeaseGroupsResponse, await self._leased(run_id, ask, seen, wait_s))

    async def _leased(self, run_id: str, ask: ops.StageAsk, seen: Revision, wait_s: float) -> ops.StageLeased:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            ticket = self.lines.ticket(run_id, Topic.STAGES)
            leased = await self.store.call(commands.lease_groups(run_id, ask, seen_revision=seen))
            if leased.leases or loop.time() >= deadline:
                return leased
            await self.lines.hint(run_id, Topic.STAGES, ticket, deadline)
