"""The worker's calls to the service: two channels, every request repeated until it is answered.

Invariants: a request carries the highest revision this worker has seen; repeats are byte-identical apart from that; a
call gives up only after `timeout_s` without an answer, or on an error that no repeat can mend.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import grpc
import structlog

from buffer_wire.codec import Buffer
from buffer_wire.connection.access import Access
from buffer_wire.connection.channels import Connector
from buffer_wire.connection.retry import Backoff, Retry
from buffer_wire.connection.stream_end import StreamEnd
from buffer_wire.errors import RolloutBufferError, RunPaused, Unauthenticated, UnknownRun
from buffer_wire.payloads.parts import NewPayload
from buffer_wire.payloads.relayed import WRITE_METHOD, written_messages
from buffer_wire.payloads.way import ASK_TIMEOUT_S
from buffer_wire.revision import Claimable, Revision
from buffer_wire.revisions import Revisions
from rollout_buffer.v1 import (
    common_pb2,
    groups_pb2,
    payloads_pb2,
    payloads_pb2_grpc,
    runs_pb2,
    runs_pb2_grpc,
    tasks_pb2,
    tasks_pb2_grpc,
    weights_pb2,
    weights_pb2_grpc,
)
from rollout_workers.service.heartbeats import Heartbeats
from rollout_workers.versions import Version

R = TypeVar("R")

OfPayloads: TypeAlias = payloads_pb2.PayloadAccess | payloads_pb2.WritePayloadResponse | payloads_pb2.ReadBlobResponse
PushStream = grpc.aio.StreamStreamCall[bytes, groups_pb2.PushGroupsResponse]
WatchStream = grpc.aio.UnaryStreamCall[weights_pb2.WatchWeightsRequest, weights_pb2.WatchWeightsResponse]

SLOWEST_BYTES_PER_S = 1 << 20
"""Rate, in bytes a second, at which the service takes a payload at the slowest."""

CALL_TIMEOUT_S = 15.0
"""Longest wait for one attempt, beyond what the request itself asks the service to wait."""

BACKOFF = Backoff(first_s=0.05, ceiling_s=2.0)

_log = structlog.get_logger()


def worth_waiting(error: RolloutBufferError) -> bool:
    """True for errors that end by themselves, or when a trainer creates or resumes the run: a server that shuts down
    cancels what it was doing.
    """
    return error.retryable or isinstance(error, RunPaused | UnknownRun) or error.attributes.get("status") == "CANCELLED"


def on_whom(error: RolloutBufferError, address: str) -> str:
    """Party that has to act before the error goes away."""
    if isinstance(error, UnknownRun):
        return "the trainer, which creates the run"
    if isinstance(error, RunPaused):
        return "an operator, or a trainer's resume"
    return f"the service at {address}"


class WaitLog:
    """Says at most every `every_s` what is waited for; one per kind of wait."""

    def __init__(self, what: str, every_s: float = 10.0) -> None:
        self._what = what
        self._every_s = every_s
        self._said_at = float("-inf")

    def say(self, waiting_on: str, why: str) -> None:
        """Log a warning unless one was logged just now."""
        now = time.monotonic()
        if now - self._said_at >= self._every_s:
            self._said_at = now
            _log.warning("waiting", to=self._what, waiting_on=waiting_on, why=why)


class ServiceClient:
    """Connection of one worker to one run of the service."""

    def __init__(
        self, address: str, run_id: str, *, instance_id: str, timeout_s: float, access: Access | None = None
    ) -> None:
        self.address = address
        self.run_id = run_id
        self.instance_id = instance_id
        self.timeout_s = timeout_s
        self.revisions = Revisions()
        self._connector = Connector(address, access or Access())
        self.tokens = self._connector.tokens
        self._control = self._connector.asyncio()
        self._bulk = self._connector.asyncio()
        self.heartbeats = Heartbeats(self._control, self.ref, worth_waiting)
        self._tasks = tasks_pb2_grpc.TaskServiceStub(self._control)
        self._runs = runs_pb2_grpc.RunServiceStub(self._control)
        self._weights = weights_pb2_grpc.WeightServiceStub(self._control)
        self._payloads = payloads_pb2_grpc.PayloadServiceStub(self._control)
        self._closing: set[asyncio.Future[None]] = set()
        """Former connections, with calls that have not ended."""
        self._waits: dict[str, WaitLog] = {}
        self._max_group_bytes: int | None = None
        """Limit that the service said last; None: it has said none yet."""

    def ref(self) -> common_pb2.RunRef:
        """The run, with the highest revision seen."""
        return self.revisions.ref(self.run_id)

    def note(self, reply: Claimable | runs_pb2.GetRunResponse | OfPayloads) -> None:
        """Take the revision of a reply into account; a view's acknowledges nothing, and those of payloads have none."""
        if not isinstance(reply, runs_pb2.GetRunResponse | OfPayloads):
            self.revisions.note(self.run_id, Revision.of(reply))

    def met(self, error: RolloutBufferError) -> bool:
        """Take an error into account; True when what failed can be tried again at once."""
        return self.revisions.met(self.run_id, error)

    def renewed(self, error: RolloutBufferError, token: str) -> bool:
        """True when the service has refused `token` and there is another one by now."""
        return isinstance(error, Unauthenticated) and self.tokens.renew(token)

    def wait_log(self, what: str) -> WaitLog:
        """The log of waits to `what`."""
        return self._waits.setdefault(what, WaitLog(what))

    async def lease(
        self,
        holder: str,
        request_id: str,
        loaded: Version,
        *,
        max_tasks: int,
        wait_s: float,
        sink: "tasks_pb2.TaskSink.ValueType" = tasks_pb2.TASK_SINK_QUEUE,
        would_load: bool = False,
    ) -> tasks_pb2.LeaseTasksResponse:
        """Up to `max_tasks` leases for engine `holder`; waits up to `wait_s` at the service for the first one.

        `would_load`: the reply is to say which weights an evaluation wants.
        """

        def attempt() -> Awaitable[tasks_pb2.LeaseTasksResponse]:
            request = tasks_pb2.LeaseTasksRequest(
                run=self.ref(),
                worker_id=holder,
                instance_id=self.instance_id,
                request_id=request_id,
                engine_id=holder,
                loaded=loaded.wire(),
                max_tasks=max_tasks,
                wait_ms=round(wait_s * 1000),
                sink=sink,
                would_load=would_load,
            )
            return self._tasks.LeaseTasks(request, timeout=CALL_TIMEOUT_S + wait_s)

        return await self.repeat("lease tasks", attempt, self.timeout_s)

    async def read_blob(self, sha256: str) -> bytes:
        """A blob of the run. Raises UnknownBlob."""

        def attempt() -> Awaitable[payloads_pb2.ReadBlobResponse]:
            request = payloads_pb2.ReadBlobRequest(run=self.ref(), sha256=sha256)
            return payloads_pb2_grpc.PayloadServiceStub(self._bulk).ReadBlob(request, timeout=CALL_TIMEOUT_S)

        return (await self.repeat("read a blob", attempt, self.timeout_s)).data

    async def extend(
        self, holder: str, lease_ids: Sequence[str], *, timeout_s: float
    ) -> tasks_pb2.ExtendLeasesResponse:
        """Heartbeat for leases of `holder`; gives up after `timeout_s`, so that the next one can begin."""

        def attempt() -> Awaitable[tasks_pb2.ExtendLeasesResponse]:
            request = tasks_pb2.ExtendLeasesRequest(worker_id=holder, instance_id=self.instance_id, lease_ids=lease_ids)
            return self.heartbeats.extend(request, min(CALL_TIMEOUT_S, timeout_s))

        return await self.repeat("extend leases", attempt, timeout_s)

    async def give_back(
        self, holder: str, returns: Sequence[tasks_pb2.LeaseReturn], *, timeout_s: float | None = None
    ) -> tasks_pb2.ReturnLeasesResponse:
        """Hand leases of `holder` back, within `timeout_s`; on the bulk channel, for partial rollouts can be large."""
        allowed_s = timeout_s or self.timeout_s

        def attempt() -> Awaitable[tasks_pb2.ReturnLeasesResponse]:
            request = tasks_pb2.ReturnLeasesRequest(
                run=self.ref(), worker_id=holder, instance_id=self.instance_id, returns=returns
            )
            return tasks_pb2_grpc.TaskServiceStub(self._bulk).ReturnLeases(
                request, timeout=min(CALL_TIMEOUT_S, allowed_s)
            )

        return await self.repeat("return leases", attempt, allowed_s)

    async def report(
        self, report: weights_pb2.EngineReport, *, wants_load: bool = False, timeout_s: float | None = None
    ) -> weights_pb2.ReportEngineResponse:
        """Report where an engine stands, and ask for its permit to be out of service to load; gives up
        after `timeout_s`.
        """
        allowed_s = timeout_s or self.timeout_s

        def attempt() -> Awaitable[weights_pb2.ReportEngineResponse]:
            request = weights_pb2.ReportEngineRequest(report=report, wants_load=wants_load)
            return self.heartbeats.report(request, min(CALL_TIMEOUT_S, allowed_s))

        return await self.repeat("report an engine", attempt, allowed_s)

    async def write_access(self, client_id: str, trouble: str) -> payloads_pb2.PayloadAccess:
        """Access to the store for new payloads, or why they are relayed. `trouble`: why the last one was of no use.

        Raises RolloutBufferError, well before its caller gives up.
        """
        allowed_s = ASK_TIMEOUT_S / 3

        def attempt() -> Awaitable[payloads_pb2.PayloadAccess]:
            request = payloads_pb2.PayloadAccessRequest(
                run=self.ref(), client_id=client_id, trouble=trouble, knows_shards=True
            )
            return self._payloads.GetWriteAccess(request, timeout=allowed_s)

        access = await self.repeat("ask for access to the store", attempt, allowed_s)
        self._max_group_bytes = access.max_group_bytes
        return access

    async def max_group_bytes(self, client_id: str) -> int:
        """Largest payload of a group, in bytes, as the service said last; it is asked where it has not said so yet.

        0: it knows no payloads in parts. Raises RolloutBufferError.
        """
        if self._max_group_bytes is None:
            await self.write_access(client_id, "")
        return self._max_group_bytes or 0

    async def write_payload(self, header: bytes, payload: Sequence[Buffer]) -> groups_pb2.StoredPayload:
        """Have the service write the group of a serialized header and a payload in pieces to the store, part by part.

        Raises RolloutBufferError.
        """
        timeout_s = CALL_TIMEOUT_S + sum(map(len, payload)) / SLOWEST_BYTES_PER_S
        stored = groups_pb2.StoredPayload()

        async def attempt() -> payloads_pb2.WritePayloadResponse:
            # A key is never used again: parts of it may be there.
            nonlocal stored
            new = NewPayload.of(self.run_id, header, payload, in_parts=True)
            stored = new.stored
            # After a move it is another one.
            write: Any = self._bulk.stream_unary
            begin = write(WRITE_METHOD, None, payloads_pb2.WritePayloadResponse.FromString)
            call = begin(written_messages(self.ref(), new), timeout=timeout_s)
            end = StreamEnd(call)
            try:
                written: payloads_pb2.WritePayloadResponse = await call
            except grpc.RpcError as raised:
                raise await end.error() or raised from raised
            return written

        await self.repeat("write a payload", attempt, self.timeout_s + timeout_s)
        return stored

    async def engines(self, *, timeout_s: float) -> Sequence[weights_pb2.EngineReport]:
        """The engines of the run, as they were last reported. Raises RolloutBufferError."""
        return (await self._view("ask for the engines", timeout_s)).run.engines

    async def revision(self) -> int:
        """The run's revision, as this worker knows it; it is asked for if no reply has told it yet. Raises
        RolloutBufferError.
        """
        return self.ref().seen_revision or (await self._view("ask for the run", self.timeout_s)).revision

    async def created_ms(self) -> int:
        """Creation time of the run, in milliseconds since 1970. Raises RolloutBufferError."""
        return (await self._view("ask for the run", self.timeout_s)).run.created_ms

    async def _view(self, what: str, timeout_s: float) -> runs_pb2.GetRunResponse:
        def attempt() -> Awaitable[runs_pb2.GetRunResponse]:
            return self._runs.GetRun(runs_pb2.GetRunRequest(run=self.ref()), timeout=min(CALL_TIMEOUT_S, timeout_s))

        return await self.repeat(what, attempt, timeout_s)

    def watch(self) -> WatchStream:
        """A stream of the published weights, the present state first."""
        return self._weights.WatchWeights(weights_pb2.WatchWeightsRequest(run=self.ref()))

    def push(self) -> PushStream:
        """A push stream on the bulk channel; takes serialized PushGroupsRequests."""
        begin = self._bulk.stream_stream(
            "/rollout_buffer.v1.GroupService/PushGroups",
            # Requests are built by buffer_wire.codec: bytes already.
            request_serializer=None,
            response_deserializer=groups_pb2.PushGroupsResponse.FromString,
        )
        return cast("PushStream", begin())  # type: ignore[call-arg]  # written to, not iterated

    def move(self) -> None:
        """Have what is pushed go over a new connection, perhaps to another process of the service; calls on the old
        one have `CALL_TIMEOUT_S` to end.
        """
        former, self._bulk = self._bulk, self._connector.asyncio()
        closing = asyncio.ensure_future(former.close(CALL_TIMEOUT_S))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close both channels."""
        self.heartbeats.close()
        await self._control.close(None)
        await self._bulk.close(None)
        for closing in self._closing:
            closing.cancel()

    async def repeat(self, what: str, attempt: Callable[[], Awaitable[R]], timeout_s: float) -> R:
        """Call until it is answered; gives up after `timeout_s`, or on an error that no repeat can mend."""

        def waiting(error: RolloutBufferError, _attempts: int, _wait_s: float) -> None:
            self.wait_log(what).say(on_whom(error, self.address), str(error))

        retry = Retry(
            deadline_s=timeout_s,
            waiting_on=f"the service at {self.address}, to {what}",
            backoff=BACKOFF,
            retry_on=worth_waiting,
            on_retry=waiting,
            tokens=self.tokens,
            mend=self.met,
        )
        reply: Any = await retry.asyncio(attempt)
        self.note(reply)
        return cast("R", reply)
