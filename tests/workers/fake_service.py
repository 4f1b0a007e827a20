"""A fake of the service's task, group and weight RPCs, in this process, for tests of the worker alone.

It is not the service: leases never expire by themselves, nothing is stored, and every answer can be scripted. State
survives `stop` and `start`, as the service's does in its store.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from buffer_wire.codec import group_head
from buffer_wire.connection.channel import server_options
from buffer_wire.errors import InvalidField, PermissionDenied, RolloutBufferError
from buffer_wire.layout import payload_bytes, read_payload
from buffer_wire.limits import MAX_ERROR_CHARS
from buffer_wire.payloads.keys import group_checksum, payload_key
from buffer_wire.status import status_of, to_detail
from rollout_buffer.v1 import (
    common_pb2,
    groups_pb2,
    groups_pb2_grpc,
    payloads_pb2,
    payloads_pb2_grpc,
    runs_pb2,
    runs_pb2_grpc,
    tasks_pb2,
    tasks_pb2_grpc,
    weights_pb2,
    weights_pb2_grpc,
)

if TYPE_CHECKING:
    from tests.support.payload_store import PayloadStore

Outcome = int
Context = Any
"""Context: what gRPC hands to a servicer; its stubs make it generic over messages that do not matter here."""


@dataclass
class FakeTask:
    task: tasks_pb2.Task
    attempt: int = 0
    leased_to: str = ""
    partial_rollout: groups_pb2.Group | None = None
    result: groups_pb2.Group | None = None
    failed: bool = False

    @property
    def lease_id(self) -> str:
        return f"{self.task.task_id}/0/{self.attempt}"


@dataclass
class FakeService:
    ttl_ms: int = 60_000
    tasks: dict[str, FakeTask] = field(default_factory=dict)
    returns: list[tasks_pb2.LeaseReturn] = field(default_factory=list)
    reports: list[weights_pb2.EngineReport] = field(default_factory=list)
    lease_requests: list[tasks_pb2.LeaseTasksRequest] = field(default_factory=list)
    extends: list[list[str]] = field(default_factory=list)
    heartbeats: int = 0
    """Calls that joined several extensions and reports."""
    knows_heartbeats: bool = True
    """False: a service of before there was such a call."""
    refuses_what_it_does_not_know: bool = False
    """True: as a service does that asks for tokens."""
    heartbeats_refused: int = 0
    bundles: list[int] = field(default_factory=list)
    """Groups of each received bundle."""
    pushers: list[str] = field(default_factory=list)
    """Connections of the push streams, by address and port, in the order in which they came."""
    outcomes: deque[Outcome] = field(default_factory=deque)
    """Answers to the next pushes, in place of the right ones."""
    refuse_pushes: deque[RolloutBufferError] = field(default_factory=deque)
    """Errors that end the next push streams, at their first bundle."""
    forgotten: int = 0
    """Pushes without leases that were first tried below this revision may be repeats."""
    swallow_acks: int = 0
    """So many bundles are accepted, but their acknowledgement is lost with the stream."""
    lose_lease_replies: int = 0
    """So many lease requests grant, but the reply is lost."""
    lost_leases: set[str] = field(default_factory=set)
    """Lease ids that heartbeats are told to be lost."""
    cancelled_leases: set[str] = field(default_factory=set)
    """Lease ids that heartbeats are told to be taken back."""
    retry_failed: bool = False
    """A task that comes back as failed is pending again, as below the attempt cap."""
    holds: bool = True
    """False: a lease request that finds nothing is answered at once."""
    hold_pushes: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared: pushes wait, as in a full queue that blocks."""
    hold_reports: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared: reports are not answered."""
    held_pushes: int = 0
    """Bundles that wait for it."""
    refuse_task_ids: set[str] = field(default_factory=set)
    """A bundle with one of them ends its stream with an error that no repeat can mend."""
    payloads: "PayloadStore | None" = None
    """Store to which it gives access; without one it is a service of before there was such access."""
    refuse_access: RolloutBufferError | None = None
    """Answer to requests for access, in place of one."""
    troubles: list[str] = field(default_factory=list)
    """Reasons with which access was asked for."""
    stored: list[groups_pb2.Group] = field(default_factory=list)
    """Pushes, each repeat of one too, that named a payload in the store."""
    wait: "tasks_pb2.LeaseWait.ValueType" = tasks_pb2.LEASE_WAIT_NO_TASKS
    max_unavailable: int = 0
    """Engines that may load at once; 0: all."""
    permits: set[str] = field(default_factory=set)
    """Engines that may load now, where there is a limit."""
    port: int = 0

    def __post_init__(self) -> None:
        self.hold_pushes.set()
        self.hold_reports.set()
        self.published = common_pb2.WeightVersion(term=1)
        self.manifest: weights_pb2.WeightManifest | None = None
        self.plan: weights_pb2.CollectivePlan | None = None
        self.engines: dict[str, weights_pb2.EngineReport] = {}
        self.revision = 1
        self._last: dict[str, tuple[str, list[str]]] = {}
        self._server: grpc.aio.Server | None = None
        self._changed = asyncio.Condition()

    # ── the test's side ──────────────────────────────────────────────────────

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        server = grpc.aio.server(options=server_options())
        tasks_pb2_grpc.add_TaskServiceServicer_to_server(_Tasks(self), server)
        groups_pb2_grpc.add_GroupServiceServicer_to_server(_Groups(self), server)
        weights_pb2_grpc.add_WeightServiceServicer_to_server(_Weights(self), server)
        runs_pb2_grpc.add_RunServiceServicer_to_server(_Runs(self), server)  # type: ignore[abstract]
        if self.payloads is not None:
            payloads_pb2_grpc.add_PayloadServiceServicer_to_server(_Payloads(self, self.payloads), server)
        self.port = server.add_insecure_port(f"127.0.0.1:{self.port}")
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """At once, as by kill -9: whatever runs is cut off."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def submit(self, *tasks: tasks_pb2.Task) -> None:
        async with self._changed:
            for task in tasks:
                self.tasks[task.task_id] = FakeTask(task)
            self._changed.notify_all()

    async def publish(self, term: int, version: int, manifest: weights_pb2.WeightManifest | None = None) -> None:
        async with self._changed:
            self.published = common_pb2.WeightVersion(term=term, version=version)
            self.manifest = manifest
            self.plan = None
            self.revision += 1
            self._changed.notify_all()

    async def announce(self, plan: weights_pb2.CollectivePlan | None) -> None:
        """Do what the trainer's PlanCollective does; None: as a resume takes it back."""
        async with self._changed:
            self.plan = plan
            self.revision += 1
            self._changed.notify_all()

    async def until(self, holds: "object", timeout_s: float = 20.0) -> None:
        """Wait until `holds()`; looked at after every request."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(holds)  # type: ignore[arg-type]

    def engine(self, engine_id: str = "w.e0") -> weights_pb2.EngineReport:
        """Its last report; an empty one before the first."""
        return self.engines.get(engine_id, weights_pb2.EngineReport())

    def results(self) -> dict[str, groups_pb2.Group]:
        return {task_id: task.result for task_id, task in self.tasks.items() if task.result is not None}

    def tokens(self, task_id: str) -> list[list[int]]:
        """Token ids of each sample of a result."""
        group = self.results()[task_id]
        ids, at, rows = read_payload(group.header, group.payload)["token_ids"], 0, []
        for sample in group.header.samples:
            rows.append([int(token) for token in ids[at : at + sample.tokens]])
            at += sample.tokens
        return rows

    # ── the rules, roughly ───────────────────────────────────────────────────

    async def changed(self) -> None:
        async with self._changed:
            self.revision += 1
            self._changed.notify_all()

    async def lease(self, request: tasks_pb2.LeaseTasksRequest) -> tasks_pb2.LeaseTasksResponse:
        self.lease_requests.append(request)
        holder = f"{request.worker_id}@{request.instance_id}"
        last_id, last_leases = self._last.get(holder, ("", []))
        if last_id == request.request_id and last_leases:
            granted = [
                task for task in self.tasks.values() if task.lease_id in last_leases and task.leased_to == holder
            ]
        else:
            try:
                async with asyncio.timeout(request.wait_ms / 1000 if self.holds else 0), self._changed:
                    await self._changed.wait_for(lambda: bool(self._pending()))
            except TimeoutError:
                pass
            granted = self._pending()[: request.max_tasks]
            for task in granted:
                task.attempt += 1
                task.leased_to = holder
            self._last[holder] = (request.request_id, [task.lease_id for task in granted])
        await self.changed()
        return tasks_pb2.LeaseTasksResponse(
            revision=self.revision,
            leases=[
                tasks_pb2.Lease(
                    lease_id=task.lease_id,
                    task=task.task,
                    attempt=task.attempt,
                    ttl_ms=self.ttl_ms,
                    partial_rollout=task.partial_rollout,
                )
                for task in granted
            ],
            wait=tasks_pb2.LEASE_WAIT_UNSPECIFIED if granted else self.wait,
            published=self.published,
        )

    def _pending(self) -> list[FakeTask]:
        return [t for t in self.tasks.values() if not t.leased_to and t.result is None and not t.failed]

    def state_of(self, lease_id: str) -> "tasks_pb2.LeaseState.ValueType":
        if lease_id in self.cancelled_leases:
            return tasks_pb2.LEASE_STATE_CANCELLED
        return tasks_pb2.LEASE_STATE_LIVE if self.live(lease_id) else tasks_pb2.LEASE_STATE_LOST

    def live(self, lease_id: str) -> FakeTask | None:
        if lease_id in self.lost_leases:
            return None
        task = self.tasks.get(lease_id.partition("/")[0])
        return task if task is not None and task.leased_to and task.lease_id == lease_id else None

    def take(self, group: groups_pb2.Group) -> groups_pb2.PushAck:
        first = group.header.first_revision
        if not group.header.lease_id and first < self.forgotten:
            forgotten = InvalidField("first_revision", first, f"at least {self.forgotten}")
            return groups_pb2.PushAck(outcome=groups_pb2.PUSH_OUTCOME_INVALID, error=to_detail(forgotten))
        outcome = self.outcomes.popleft() if self.outcomes else None
        task = self.tasks[group.header.task_id]
        if group.HasField("stored"):
            self.stored.append(group)
            if outcome is None and task.result is None:
                found = self._from_store(group)
                if found is None:
                    return groups_pb2.PushAck(outcome=groups_pb2.PUSH_OUTCOME_PAYLOAD_MISSING)
                group = found
        if outcome is None:
            outcome = groups_pb2.PUSH_OUTCOME_QUEUED
            if task.result is not None:
                same = task.result.header.lease_id == group.header.lease_id
                outcome = groups_pb2.PUSH_OUTCOME_DUPLICATE if same else groups_pb2.PUSH_OUTCOME_CLOSED
        if outcome in (groups_pb2.PUSH_OUTCOME_QUEUED, groups_pb2.PUSH_OUTCOME_FILTERED):
            task.result, task.leased_to = group, ""
        error = None
        if outcome == groups_pb2.PUSH_OUTCOME_INVALID:
            error = to_detail(RolloutBufferError("the group breaks a rule"))
        return groups_pb2.PushAck(outcome=outcome, group_id=f"{group.header.task_id}/0", error=error)  # type: ignore[arg-type]

    def _from_store(self, group: groups_pb2.Group) -> groups_pb2.Group | None:
        assert self.payloads is not None
        header, at = group.header.SerializeToString(), group.stored
        payload_size = payload_bytes(group.header)
        size = len(group_head(header, payload_size)) + payload_size
        key = payload_key("r", at.nonce, group_checksum(header, at.checksum), size)
        body = self.payloads.take(key)
        return groups_pb2.Group.FromString(body) if body is not None else None


class _Tasks(tasks_pb2_grpc.TaskServiceServicer):
    def __init__(self, fake: FakeService) -> None:
        self.fake = fake

    async def SubmitTasks(
        self, request: tasks_pb2.SubmitTasksRequest, context: Context
    ) -> tasks_pb2.SubmitTasksResponse:
        raise NotImplementedError("the trainer's; see FakeService.submit")

    async def LeaseTasks(self, request: tasks_pb2.LeaseTasksRequest, context: Context) -> tasks_pb2.LeaseTasksResponse:
        if request.sink == tasks_pb2.TASK_SINK_EVALUATIONS:
            await asyncio.sleep(request.wait_ms / 1000)
            return tasks_pb2.LeaseTasksResponse(wait=tasks_pb2.LEASE_WAIT_NO_TASKS)
        reply = await self.fake.lease(request)
        if self.fake.lose_lease_replies:
            self.fake.lose_lease_replies -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the reply was lost")
        return reply

    async def ExtendLeases(
        self, request: tasks_pb2.ExtendLeasesRequest, context: Context
    ) -> tasks_pb2.ExtendLeasesResponse:
        self.fake.extends.append(list(request.lease_ids))
        states = [self.fake.state_of(lease_id) for lease_id in request.lease_ids]
        await self.fake.changed()
        return tasks_pb2.ExtendLeasesResponse(revision=self.fake.revision, states=states, ttl_ms=self.fake.ttl_ms)

    async def Heartbeat(self, request: tasks_pb2.HeartbeatRequest, context: Context) -> tasks_pb2.HeartbeatResponse:
        if not self.fake.knows_heartbeats:
            self.fake.heartbeats_refused += 1
            if self.fake.refuses_what_it_does_not_know:
                await context.abort(*status_of(PermissionDenied("Heartbeat", "t", "worker", "call Heartbeat")))
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        self.fake.heartbeats += 1
        weights = _Weights(self.fake)
        extended = [await self.ExtendLeases(each, context) for each in request.extensions]
        reported = [await weights.ReportEngine(each, context) for each in request.reports]
        return tasks_pb2.HeartbeatResponse(
            revision=self.fake.revision, revision_proof="p", extended=extended, reported=reported
        )

    async def ReturnLeases(
        self, request: tasks_pb2.ReturnLeasesRequest, context: Context
    ) -> tasks_pb2.ReturnLeasesResponse:
        outcomes = []
        for returned in request.returns:
            self.fake.returns.append(returned)
            task = self.fake.live(returned.lease_id)
            if task is None:
                outcomes.append(tasks_pb2.RETURN_OUTCOME_LOST)
                continue
            task.leased_to = ""
            task.failed = returned.kind == tasks_pb2.RETURN_KIND_FAILED and not self.fake.retry_failed
            if returned.HasField("partial_rollout"):
                task.partial_rollout = returned.partial_rollout
            outcomes.append(tasks_pb2.RETURN_OUTCOME_FAILED if task.failed else tasks_pb2.RETURN_OUTCOME_PENDING)
        await self.fake.changed()
        return tasks_pb2.ReturnLeasesResponse(revision=self.fake.revision, outcomes=outcomes)


class _Groups(groups_pb2_grpc.GroupServiceServicer):
    def __init__(self, fake: FakeService) -> None:
        self.fake = fake

    async def PushGroup(self, request: groups_pb2.PushGroupRequest, context: Context) -> groups_pb2.PushGroupResponse:
        raise NotImplementedError("the worker streams")

    async def PushGroups(
        self, request_iterator: AsyncIterator[groups_pb2.PushGroupsRequest], context: Context
    ) -> AsyncIterator[groups_pb2.PushGroupsResponse]:
        self.fake.pushers.append(context.peer())
        async for request in request_iterator:
            self.fake.bundles.append(len(request.groups))
            if self.fake.refuse_pushes:
                await _abort(context, self.fake.refuse_pushes.popleft())
            if self.fake.refuse_task_ids & {group.header.task_id for group in request.groups}:
                await _abort(context, RolloutBufferError("malformed message"))
            self.fake.held_pushes += 1
            try:
                await self.fake.hold_pushes.wait()
            finally:
                # Also when the worker has given the stream up.
                self.fake.held_pushes -= 1
                await self.fake.changed()
            acks = [self.fake.take(group) for group in request.groups]
            await self.fake.changed()
            if self.fake.swallow_acks:
                self.fake.swallow_acks -= 1
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the acknowledgement was lost")
            yield groups_pb2.PushGroupsResponse(
                revision=self.fake.revision, sequence=request.sequence, acks=acks, published=self.fake.published
            )


class _Payloads(payloads_pb2_grpc.PayloadServiceServicer):
    def __init__(self, fake: FakeService, store: "PayloadStore") -> None:
        self.fake = fake
        self.store = store

    async def GetWriteAccess(
        self, request: payloads_pb2.PayloadAccessRequest, context: Context
    ) -> payloads_pb2.PayloadAccess:
        self.fake.troubles.append(request.trouble)
        await self.fake.changed()
        if self.fake.refuse_access is not None:
            await _abort(context, self.fake.refuse_access)
        return self.store.access("w", direct_from_bytes=20_000)

    async def GetReadAccess(
        self, request: payloads_pb2.PayloadAccessRequest, context: Context
    ) -> payloads_pb2.PayloadAccess:
        raise NotImplementedError("the trainer's")

    async def WritePayload(
        self, requests: AsyncIterator[payloads_pb2.WritePayloadRequest], context: Context
    ) -> payloads_pb2.WritePayloadResponse:
        raise NotImplementedError("for who cannot reach the store")

    async def WriteBlob(
        self, request: payloads_pb2.WriteBlobRequest, context: Context
    ) -> payloads_pb2.WriteBlobResponse:
        raise NotImplementedError("the trainer's")

    async def ReadBlob(self, request: payloads_pb2.ReadBlobRequest, context: Context) -> payloads_pb2.ReadBlobResponse:
        raise NotImplementedError("no task of it has an image")

    def ReadPayload(
        self, request: payloads_pb2.ReadPayloadRequest, context: Context
    ) -> AsyncIterator[payloads_pb2.ReadPayloadResponse]:
        raise NotImplementedError("the trainer's")


class _Weights(weights_pb2_grpc.WeightServiceServicer):
    def __init__(self, fake: FakeService) -> None:
        self.fake = fake

    async def Publish(self, request: weights_pb2.PublishRequest, context: Context) -> weights_pb2.PublishResponse:
        raise NotImplementedError("the trainer's; see FakeService.publish")

    async def PlanCollective(
        self, request: weights_pb2.PlanCollectiveRequest, context: Context
    ) -> weights_pb2.PlanCollectiveResponse:
        raise NotImplementedError("the trainer's; see FakeService.announce")

    async def WatchWeights(
        self, request: weights_pb2.WatchWeightsRequest, context: Context
    ) -> AsyncIterator[weights_pb2.WatchWeightsResponse]:
        sent = None
        while True:
            async with self.fake._changed:
                await self.fake._changed.wait_for(lambda sent=sent: self._state() != sent)  # type: ignore[misc]
                sent = self._state()
            reply = weights_pb2.WatchWeightsResponse()
            reply.CopyFrom(sent)
            reply.revision = self.fake.revision
            yield reply

    def _state(self) -> weights_pb2.WatchWeightsResponse:
        fake = self.fake
        return weights_pb2.WatchWeightsResponse(published=fake.published, manifest=fake.manifest, plan=fake.plan)

    async def ReportEngine(
        self, request: weights_pb2.ReportEngineRequest, context: Context
    ) -> weights_pb2.ReportEngineResponse:
        fake, engine_id = self.fake, request.report.engine_id
        await fake.hold_reports.wait()
        if len(request.report.last_error) > MAX_ERROR_CHARS:
            said = f"{len(request.report.last_error)} characters"
            await _abort(context, InvalidField("report.last_error", said, f"at most {MAX_ERROR_CHARS} characters"))
        fake.reports.append(request.report)
        fake.engines[engine_id] = request.report
        if not request.wants_load:
            fake.permits.discard(engine_id)
        elif fake.max_unavailable and len(fake.permits | {engine_id}) <= fake.max_unavailable:
            fake.permits.add(engine_id)
        await fake.changed()
        return weights_pb2.ReportEngineResponse(
            revision=fake.revision,
            published=fake.published,
            may_load=not fake.max_unavailable or engine_id in fake.permits,
        )


class _Runs(runs_pb2_grpc.RunServiceServicer):
    def __init__(self, fake: FakeService) -> None:
        self.fake = fake

    async def GetRun(self, request: runs_pb2.GetRunRequest, context: Context) -> runs_pb2.GetRunResponse:
        engines = [self.fake.engines[engine_id] for engine_id in sorted(self.fake.engines)]
        return runs_pb2.GetRunResponse(revision=self.fake.revision, run=runs_pb2.Run(engines=engines))


async def _abort(context: Context, error: RolloutBufferError) -> None:
    code, details, trailing = status_of(error)
    await context.abort(code, details, trailing)
