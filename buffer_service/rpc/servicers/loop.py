"""The RPCs of runs, tasks, batches and weights: parse, call the store, encode. The interceptor translates errors.

PullBatch is handed bytes and hands back bytes, so that no payload is parsed by protobuf.
"""

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc.aio

from buffer_service import commands
from buffer_service.domain.policy import RunPolicy
from buffer_service.domain.ports import RunStore
from buffer_service.observability.metrics import RpcMetrics
from buffer_service.rpc.convert import batches, fields, plans, policies, runs, tasks, weights
from buffer_service.rpc.flow.budget import StreamSlots
from buffer_service.rpc.flow.drain import Drain
from buffer_service.rpc.flow.leasing import Leasing
from buffer_service.rpc.flow.room import RawContext
from buffer_service.rpc.flow.steering import steer
from buffer_service.rpc.messages import parsed
from buffer_service.rpc.streams import export as export_stream
from buffer_service.rpc.streams.pull import PullStream
from buffer_service.rpc.streams.weights import WeightsFeed
from buffer_service.security.gate import caller
from buffer_wire.errors import PolicyChanged
from buffer_wire.messages import message_of
from buffer_wire.revision import Revision
from rollout_buffer.v1 import (
    batches_pb2,
    runs_pb2,
    runs_pb2_grpc,
    tasks_pb2,
    tasks_pb2_grpc,
    weights_pb2,
)

Context = grpc.aio.ServicerContext[Any, Any]

_WITHOUT_REVISION: dict[str, Any] = {"revision": 0, "revision_proof": ""}

POLICY_TRIES = 8
"""Largest number of tries to change a policy's fields while others change it; then the caller has to ask again."""


@dataclass(frozen=True, slots=True)
class RunServicer(runs_pb2_grpc.RunServiceServicer):
    """Servicer of runs."""

    store: RunStore
    bounds: policies.QuotaBounds
    slots: StreamSlots

    async def CreateRun(self, request: runs_pb2.CreateRunRequest, _: Context) -> runs_pb2.CreateRunResponse:
        """Create a run, or find it."""
        view, created = await self.store.create_run(
            fields.run_id(request.run_id, "run_id"),
            policies.policy(request.policy, self.bounds),
            # Microseconds: a deleted run of this name, which workers may remember, has not got as far.
            revision=time.time_ns() // 1_000,
        )
        return runs_pb2.CreateRunResponse(revision=view.revision, run=runs.to_run(view), created=created)

    async def GetRun(self, request: runs_pb2.GetRunRequest, _: Context) -> runs_pb2.GetRunResponse:
        """Reply with the whole state of a run."""
        view = await self.store.call(commands.view(fields.run_id(request.run.run_id)))
        return runs_pb2.GetRunResponse(revision=view.revision, run=runs.to_run(view))

    async def ListRuns(self, _request: runs_pb2.ListRunsRequest, _: Context) -> runs_pb2.ListRunsResponse:
        """Ids of all runs that the caller may know of."""
        return runs_pb2.ListRunsResponse(run_ids=caller().visible(await self.store.list_runs()))

    async def UpdatePolicy(self, request: runs_pb2.UpdatePolicyRequest, _: Context) -> runs_pb2.UpdatePolicyResponse:
        """Replace the policy, or some fields of it."""
        run_id, seen = fields.run_ref(request.run)
        if request.fields:
            revision, policy = await self._change_policy(run_id, request, seen)
        else:
            policy = policies.policy(request.policy, self.bounds)
            revision = await self.store.call(commands.update_policy(run_id, policy, seen_revision=seen))
        return runs_pb2.UpdatePolicyResponse(
            revision=revision, revision_proof=revision.proof, policy=policies.to_policy(policy)
        )

    async def _change_policy(
        self, run_id: str, request: runs_pb2.UpdatePolicyRequest, seen: Revision
    ) -> tuple[Revision, RunPolicy]:
        tries_left = POLICY_TRIES
        while True:
            present = (await self.store.call(commands.view(run_id))).policy
            policy = policies.policy(policies.merged(present, request.policy, request.fields), self.bounds)
            tries_left -= 1
            try:
                return await self.store.call(
                    commands.update_policy(run_id, policy, present, seen_revision=seen)
                ), policy
            except PolicyChanged:
                if not tries_left:
                    raise

    async def PauseRun(self, request: runs_pb2.PauseRunRequest, _: Context) -> runs_pb2.PauseRunResponse:
        """Hold a run."""
        revision = await self.store.call(commands.pause_run(fields.run_id(request.run.run_id)))
        return runs_pb2.PauseRunResponse(revision=revision, revision_proof=revision.proof)

    async def DrainRun(self, request: runs_pb2.DrainRunRequest, _: Context) -> runs_pb2.DrainRunResponse:
        """Let a run end."""
        revision = await self.store.call(commands.drain_run(fields.run_id(request.run.run_id)))
        return runs_pb2.DrainRunResponse(revision=revision, revision_proof=revision.proof)

    async def ContinueRun(self, request: runs_pb2.ContinueRunRequest, _: Context) -> runs_pb2.ContinueRunResponse:
        """Let a run go on."""
        revision = await self.store.call(commands.continue_run(fields.run_id(request.run.run_id)))
        return runs_pb2.ContinueRunResponse(revision=revision, revision_proof=revision.proof)

    async def DeleteRun(self, request: runs_pb2.DeleteRunRequest, _: Context) -> runs_pb2.DeleteRunResponse:
        """Delete a run."""
        await self.store.delete_run(fields.run_id(request.run.run_id))
        return runs_pb2.DeleteRunResponse()

    async def ExportRecords(  # type: ignore[override]
        self, request: runs_pb2.ExportRecordsRequest, context: Context
    ) -> None:
        """Stream the events of a run's recording."""
        run_id, after = fields.run_id(request.run.run_id), export_stream.after(request)
        exported = export_stream.exported(self.store, run_id, after, include_groups=request.include_groups)
        with self.slots.slot(caller().token_id):
            async with aclosing(exported):
                async for message in exported:
                    await context.write(message)


@dataclass(frozen=True, slots=True)
class TaskServicer(tasks_pb2_grpc.TaskServiceServicer):
    """Servicer of tasks and leases."""

    store: RunStore
    leasing: Leasing
    drain: Drain
    metrics: RpcMetrics
    lease_bytes: int
    """Largest size in bytes of a reply with leases."""

    async def SubmitTasks(self, request: tasks_pb2.SubmitTasksRequest, _: Context) -> tasks_pb2.SubmitTasksResponse:
        """Add tasks."""
        run_id, seen = fields.run_ref(request.run)
        submitted = await self.store.call(commands.submit(run_id, tasks.submit(request), seen_revision=seen))
        return fields.reply(tasks_pb2.SubmitTasksResponse, submitted, pending_tasks=submitted.pending)

    async def LeaseTasks(self, request: tasks_pb2.LeaseTasksRequest, _: Context) -> tasks_pb2.LeaseTasksResponse:
        """Lease tasks, waiting for the first."""
        run_id, seen = fields.run_ref(request.run)
        ask = tasks.lease_ask(request, self.lease_bytes)
        self.drain.refuse()
        return tasks.to_leased(await self.leasing.leased(run_id, ask, seen, request.wait_ms / 1000))

    async def ExtendLeases(self, request: tasks_pb2.ExtendLeasesRequest, _: Context) -> tasks_pb2.ExtendLeasesResponse:
        """Prolong leases: a heartbeat."""
        run_id, seen = fields.run_ref(request.run)
        extended = await self.store.call(commands.extend(run_id, *tasks.extend(request), seen_revision=seen))
        return fields.reply(tasks_pb2.ExtendLeasesResponse, extended)

    async def Heartbeat(self, request: tasks_pb2.HeartbeatRequest, _: Context) -> tasks_pb2.HeartbeatResponse:
        """Prolong leases and record reports of engines: of all parts the store is asked at once."""
        run_id, seen = fields.run_ref(request.run)
        extensions, reports = tasks.heartbeat(request)
        extended, reported = await asyncio.gather(
            asyncio.gather(
                *(self.store.call(commands.extend(run_id, *each, seen_revision=seen)) for each in extensions)
            ),
            asyncio.gather(
                *(self.store.call(commands.report_engine(run_id, each, seen_revision=seen)) for each in reports)
            ),
        )
        revision = max([*(each.revision for each in extended), *(each.revision for each in reported)])
        return tasks_pb2.HeartbeatResponse(
            revision=revision,
            revision_proof=revision.proof,
            extended=[message_of(tasks_pb2.ExtendLeasesResponse, each, **_WITHOUT_REVISION) for each in extended],
            reported=[message_of(weights_pb2.ReportEngineResponse, each, **_WITHOUT_REVISION) for each in reported],
        )

    async def ReturnLeases(self, request: tasks_pb2.ReturnLeasesRequest, _: Context) -> tasks_pb2.ReturnLeasesResponse:
        """Hand leased tasks back."""
        run_id, seen = fields.run_ref(request.run)
        worker_id, instance_id, returns = tasks.give_back(request)
        returned = await self.store.call(
            commands.give_back(run_id, worker_id, instance_id, returns, seen_revision=seen)
        )
        self.metrics.returned([back.lease_id for back in returns], returned.outcomes)
        return fields.reply(tasks_pb2.ReturnLeasesResponse, returned)


@dataclass(frozen=True, slots=True)
class BatchServicer:
    """Servicer of batches; PullBatch takes and gives bytes."""

    store: RunStore
    puller: PullStream
    slots: StreamSlots

    async def PullBatch(self, message: bytes, context: RawContext) -> None:
        """Stream one rank's shard of a step."""
        request = parsed("PullBatchRequest", batches_pb2.PullBatchRequest.FromString, message)
        caller().check_run(request.run.run_id)
        with self.slots.slot(caller().token_id):
            await self.puller.run(request, fields.run_id(request.run.run_id), batches.pull(request), context)

    async def Reject(self, request: batches_pb2.RejectRequest, _: Context) -> batches_pb2.RejectResponse:
        """Give groups of a step back, which takes others."""
        run_id, seen = fields.run_ref(request.run)
        return batches.to_rejected(
            await self.store.call(commands.reject(run_id, batches.reject(request), seen_revision=seen))
        )

    async def Commit(self, request: batches_pb2.CommitRequest, _: Context) -> batches_pb2.CommitResponse:
        """Commit: the trainer's weights hold what was trained through a step."""
        run_id, seen = fields.run_ref(request.run)
        revision, steps = await self.store.call(
            commands.commit(run_id, fields.term(request.term), request.through_step, seen_revision=seen)
        )
        return batches_pb2.CommitResponse(revision=revision, revision_proof=revision.proof, committed_steps=steps)

    async def Checkpoint(self, request: batches_pb2.CheckpointRequest, _: Context) -> batches_pb2.CheckpointResponse:
        """Checkpoint: the trainer's own checkpoint holds everything through a step."""
        run_id, seen = fields.run_ref(request.run)
        revision, steps = await self.store.call(
            commands.checkpoint(run_id, fields.term(request.term), request.through_step, seen_revision=seen)
        )
        return batches_pb2.CheckpointResponse(
            revision=revision, revision_proof=revision.proof, checkpointed_steps=steps
        )

    async def Resume(self, request: batches_pb2.ResumeRequest, _: Context) -> batches_pb2.ResumeResponse:
        """Take a run over."""
        run_id = fields.run_id(request.run.run_id)
        resumed = await self.store.call(commands.resume(run_id, batches.resume(request)))
        return fields.reply(batches_pb2.ResumeResponse, resumed)


@dataclass(frozen=True, slots=True)
class WeightServicer:
    """Servicer of weight versions and engines; WatchWeights gives bytes."""

    store: RunStore
    feed: WeightsFeed

    async def Publish(self, request: weights_pb2.PublishRequest, _: Context) -> weights_pb2.PublishResponse:
        """Publish a weight version, and commit the steps that it covers."""
        run_id, seen = fields.run_ref(request.run)
        result = await self.store.call(commands.publish(run_id, weights.publish(request), seen_revision=seen))
        await steer(self.store, run_id)
        return fields.reply(weights_pb2.PublishResponse, result)

    async def WatchWeights(self, request: weights_pb2.WatchWeightsRequest, context: RawContext) -> None:
        """Stream the present weights, then every newer ones."""
        async with aclosing(self.feed.messages(fields.run_id(request.run.run_id))) as messages:
            async for message in messages:
                # It lasts for as long as the run: a token that is revoked meanwhile ends it.
                caller().check_live()
                await context.write(message)

    async def PlanCollective(
        self, request: weights_pb2.PlanCollectiveRequest, _: Context
    ) -> weights_pb2.PlanCollectiveResponse:
        """Announce a collective update."""
        run_id, seen = fields.run_ref(request.run)
        revision = await self.store.call(
            commands.plan_collective(run_id, plans.plan_collective(request), seen_revision=seen)
        )
        return weights_pb2.PlanCollectiveResponse(revision=revision, revision_proof=revision.proof)

    async def ReportEngine(
        self, request: weights_pb2.ReportEngineRequest, _: Context
    ) -> weights_pb2.ReportEngineResponse:
        """Record which weights an engine has loaded."""
        run_id, seen = fields.run_ref(request.run)
        result = await self.store.call(commands.report_engine(run_id, weights.report(request), seen_revision=seen))
        return fields.reply(weights_pb2.ReportEngineResponse, result)
