"""The RPCs of KEDA's external scaler: how many groups workers can have in flight, so that pools follow it.

A run's number is that of the leased groups and of the due tasks that may be leased, by admission and limits of starts.
Evaluations count. A run that is not there has none, so its pool may go down to no pod. KEDA sends no
token in the metadata of its calls; where the service asks for one, it is in the trigger's metadata.
"""

import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc.aio

from buffer_service import commands
from buffer_service.domain.inspection import Waits
from buffer_service.domain.ports import RunStore, Topic
from buffer_service.rpc.convert import fields
from buffer_service.rpc.flow.waiting import WaitingLines
from buffer_service.security.gate import Gate
from buffer_service.security.roles import SCALER, SCALER_PREFIX
from buffer_wire.errors import InvalidField, NotReady, UnknownRun
from rollout_buffer.keda import externalscaler_pb2 as pb
from rollout_buffer.keda import externalscaler_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

METRIC = "rollout_groups"
GROUPS_PER_WORKER = 16.0
_LOOK_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class ScalerServicer(externalscaler_pb2_grpc.ExternalScalerServicer):
    """Servicer of the external scaler. Metadata of a trigger: `run`, `groupsPerWorker`, `tokenFromEnv`."""

    store: RunStore
    gate: Gate
    lines: WaitingLines

    async def IsActive(self, request: pb.ScaledObjectRef, _: Context) -> pb.IsActiveResponse:
        """True while there is work."""
        return pb.IsActiveResponse(result=await self._wanted(self._run(request)) > 0)

    async def StreamIsActive(self, request: pb.ScaledObjectRef, _: Context) -> AsyncIterator[pb.IsActiveResponse]:
        """Tell the same at once and after every change, until the process ends, or the token does."""
        told: bool | None = None
        while True:
            # Each look asks for the token again: it may be revoked.
            run_id = self._run(request)
            ticket = self.lines.ticket(run_id, Topic.TASKS)
            if (active := await self._wanted(run_id) > 0) is not told:
                told = active
                yield pb.IsActiveResponse(result=active)
            try:
                # New tasks give a hint. That work has ended gives none, and is in no hurry.
                await self.lines.hint(run_id, Topic.TASKS, ticket, longest_s=_LOOK_EVERY_S)
            except NotReady:
                return

    async def GetMetricSpec(self, request: pb.ScaledObjectRef, _: Context) -> pb.GetMetricSpecResponse:
        """Groups that are worth a pod."""
        self._run(request)
        text = request.scalerMetadata.get("groupsPerWorker", str(GROUPS_PER_WORKER))
        try:
            worth = float(text)
        except ValueError:
            worth = math.nan
        if not 0 < worth <= 1e6:
            raise InvalidField("groupsPerWorker", text, "a number above 0, at most 1,000,000")
        spec = pb.MetricSpec(metricName=METRIC, targetSize=math.ceil(worth), targetSizeFloat=worth)
        return pb.GetMetricSpecResponse(metricSpecs=[spec])

    async def GetMetrics(self, request: pb.GetMetricsRequest, _: Context) -> pb.GetMetricsResponse:
        """Groups that workers can have in flight."""
        wanted = await self._wanted(self._run(request.scaledObjectRef))
        value = pb.MetricValue(metricName=METRIC, metricValue=wanted, metricValueFloat=wanted)
        return pb.GetMetricsResponse(metricValues=[value])

    def _run(self, asked: pb.ScaledObjectRef) -> str:
        """The run that is asked for, of which the token may know."""
        metadata = asked.scalerMetadata
        token = metadata.get("tokenFromEnv", "")
        caller = self.gate.enter(f"Bearer {token}" if token else None, f"{SCALER_PREFIX}GetMetrics", SCALER)
        run_id = fields.run_id(metadata.get("run", ""))
        caller.check_run(run_id)
        return run_id

    async def _wanted(self, run_id: str) -> int:
        try:
            view = await self.store.call(commands.view(run_id))
            waits = await self.store.waits(run_id, 1)
            _, evaluations = await self.store.call(commands.evaluations(run_id))
        except UnknownRun:
            return 0
        leased = waits.leased + sum(evaluation.leased for evaluation in evaluations)
        if view.paused:
            return leased
        pending = sum(evaluation.pending for evaluation in evaluations)
        return leased + pending + (0 if view.draining else _leasable(waits))


def _leasable(waits: Waits) -> int:
    """Due tasks that admission and limits of starts let be leased; where the limits alone forbid it, one, which keeps
    a worker for the next start.
    """
    clock = waits.clock
    room = clock.room(waits.policy, waits.leased)
    admitted = clock.due_tasks if room is None else max(0, min(clock.due_tasks, room))
    return min(admitted, max(1, clock.startable_tasks))
