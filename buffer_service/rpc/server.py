"""The gRPC server of one process: servicers, raw handlers for the payload path, health, reflection, options."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from buffer_service.domain.ports import RunStore
from buffer_service.observability.metrics import RpcMetrics
from buffer_service.rpc.convert.groups import Limits
from buffer_service.rpc.convert.policies import QuotaBounds
from buffer_service.rpc.flow.ages import StreamAges
from buffer_service.rpc.flow.budget import READERS, ByteBudget, StreamSlots
from buffer_service.rpc.flow.drain import Drain
from buffer_service.rpc.flow.leasing import Leasing
from buffer_service.rpc.flow.pushes import Pushes
from buffer_service.rpc.flow.room import Incoming, Room
from buffer_service.rpc.flow.waiting import WaitingLines
from buffer_service.rpc.interceptor import Guard
from buffer_service.rpc.janitor import Janitor
from buffer_service.rpc.servicers import loop
from buffer_service.rpc.servicers.evaluations import EvaluationServicer
from buffer_service.rpc.servicers.groups import GroupServicer
from buffer_service.rpc.servicers.inspection import InspectServicer
from buffer_service.rpc.servicers.payloads import PayloadServicer
from buffer_service.rpc.servicers.scaling import ScalerServicer
from buffer_service.rpc.servicers.stages import StageServicer
from buffer_service.rpc.streams.blobs import Blobs
from buffer_service.rpc.streams.parts import PartStreams
from buffer_service.rpc.streams.pull import PullStream
from buffer_service.rpc.streams.push import PushParts
from buffer_service.rpc.streams.weights import WeightsFeed
from buffer_service.rpc.tracing import ServiceTraces
from buffer_service.rpc_settings import RpcSettings
from buffer_service.security.gate import Gate
from buffer_service.security.shares import Shares
from buffer_wire.connection.channel import server_options
from buffer_wire.limits import MAX_MESSAGE_BYTES
from buffer_wire.payloads.keys import PART_BYTES
from rollout_buffer.keda import externalscaler_pb2_grpc
from rollout_buffer.v1 import (
    batches_pb2,
    evaluations_pb2,
    evaluations_pb2_grpc,
    groups_pb2,
    inspect_pb2,
    inspect_pb2_grpc,
    payloads_pb2,
    runs_pb2,
    runs_pb2_grpc,
    stages_pb2,
    stages_pb2_grpc,
    tasks_pb2,
    tasks_pb2_grpc,
    weights_pb2,
)

_CONTRACT: tuple[ModuleType, ...] = (
    runs_pb2,
    tasks_pb2,
    stages_pb2,
    groups_pb2,
    payloads_pb2,
    batches_pb2,
    weights_pb2,
    evaluations_pb2,
    inspect_pb2,
)
SERVICE_NAMES = tuple(
    service.full_name for module in _CONTRACT for service in module.DESCRIPTOR.services_by_name.values()
)


@dataclass(frozen=True, slots=True)
class RpcServer:
    """A server that is built but not started, and the parts that drain it."""

    server: grpc.aio.Server
    drain: Drain
    janitor: Janitor
    rooms: Sequence[Room]
    health: Any
    """The standard health servicer; grpcio-health-checking has no types for its asyncio one."""

    async def start(self) -> None:
        """Serve, and say so to health checks."""
        await self.server.start()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, grace_s: float) -> None:
        """End serving: health turns off, leases are refused, waits end; RPCs in progress have `grace_s`."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        self.drain.begin()
        await self.server.stop(grace_s)
        self.janitor.close()

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus.ValueType) -> None:
        async with asyncio.TaskGroup() as tasks:
            for name in ("", *SERVICE_NAMES):
                tasks.create_task(self.health.set(name, status))


def build(settings: RpcSettings, store: RunStore, registry: CollectorRegistry, gate: Gate) -> RpcServer:
    """Put a server together on a store; its port is added by the caller."""
    metrics = RpcMetrics(registry)
    limits = Limits(settings.max_message_bytes, settings.most_group_bytes)
    options = server_options(
        max(settings.max_message_bytes, PART_BYTES),
        max_connections=settings.max_connections,
        connection_age_s=settings.connection_age_s,
    )
    shares = Shares(settings.max_token_rpcs, settings.max_token_rpcs_per_s)
    traces = ServiceTraces.of_process(store)
    server = grpc.aio.server(interceptors=[Guard(metrics, gate, shares, traces)], options=options)
    drain, ages, janitor = Drain(), StreamAges(settings.connection_age_s, metrics), Janitor(store)
    lines = WaitingLines(store.notifications, drain)
    slots = StreamSlots(settings.max_streams, settings.max_token_streams)
    readers = StreamSlots(*READERS, named=("exports, evaluations", "exports, evaluations"))
    pushes = Pushes(store, lines, janitor, metrics)
    budget = ByteBudget(settings.blocked_bytes)
    # Apart, so that neither direction can keep the other from going on; the last quarter is for gRPC's own buffers.
    incoming = Room(settings.blocked_bytes // 4, metrics.holds("in"))
    outgoing = Room(settings.blocked_bytes // 2, metrics.holds("out"))
    groups = GroupServicer(PushParts(store, pushes, budget, Incoming(incoming), drain, ages, metrics, limits), slots)
    pulls = PullStream(store, lines, outgoing, metrics, settings.direct_from_bytes, settings.max_message_bytes, traces)
    batches = loop.BatchServicer(store, pulls, slots)
    parts = PartStreams(store, Incoming(incoming), outgoing, budget, drain, metrics, limits)
    blobs = Blobs(store, Incoming(incoming), outgoing, drain, metrics)
    payloads = PayloadServicer(store, settings, parts, blobs, slots)
    weights = loop.WeightServicer(store, WeightsFeed(store, lines, ages))
    server.add_generic_rpc_handlers(
        (_group_handlers(groups), _payload_handlers(payloads), _batch_handlers(batches), _weight_handlers(weights))
    )
    bounds = QuotaBounds(settings.max_run_groups, settings.max_run_tokens, settings.max_run_bytes)
    runs_pb2_grpc.add_RunServiceServicer_to_server(loop.RunServicer(store, bounds, readers), server)
    # Workers take no larger messages than the default, whatever this service takes.
    lease_bytes = min(settings.max_message_bytes, MAX_MESSAGE_BYTES)
    tasks_pb2_grpc.add_TaskServiceServicer_to_server(
        loop.TaskServicer(store, Leasing(store, lines), drain, metrics, lease_bytes), server
    )
    stages_pb2_grpc.add_StageServiceServicer_to_server(StageServicer(store, lines, drain), server)
    evaluations_pb2_grpc.add_EvaluationServiceServicer_to_server(EvaluationServicer(store, lines, readers), server)
    externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server(ScalerServicer(store, gate, lines), server)
    inspect_pb2_grpc.add_InspectServiceServicer_to_server(InspectServicer(store), server)
    health_servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection((*SERVICE_NAMES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return RpcServer(server, drain, janitor, (incoming, outgoing), health_servicer)


# Handlers without deserializer or serializer are given and give the messages' bytes.


def _group_handlers(groups: GroupServicer) -> "grpc.GenericRpcHandler[bytes, bytes]":
    return grpc.method_handlers_generic_handler(
        "rollout_buffer.v1.GroupService",
        {
            "PushGroups": grpc.stream_stream_rpc_method_handler(groups.PushGroups),
            # The same on the wire as a unary method, whose message gRPC would read before anybody is asked.
            "PushGroup": grpc.stream_unary_rpc_method_handler(groups.PushGroup),
        },
    )


def _payload_handlers(payloads: PayloadServicer) -> "grpc.GenericRpcHandler[Any, Any]":
    request, access = payloads_pb2.PayloadAccessRequest, payloads_pb2.PayloadAccess
    return grpc.method_handlers_generic_handler(
        "rollout_buffer.v1.PayloadService",
        {
            "GetWriteAccess": _unary(payloads.GetWriteAccess, request, access),
            "GetReadAccess": _unary(payloads.GetReadAccess, request, access),
            "WritePayload": grpc.stream_unary_rpc_method_handler(payloads.WritePayload),
            "ReadPayload": grpc.unary_stream_rpc_method_handler(
                payloads.ReadPayload,
                payloads_pb2.ReadPayloadRequest.FromString,
            ),
            # As PushGroup.
            "WriteBlob": grpc.stream_unary_rpc_method_handler(payloads.WriteBlob),
            "ReadBlob": grpc.unary_unary_rpc_method_handler(payloads.ReadBlob, payloads_pb2.ReadBlobRequest.FromString),
        },
    )


def _batch_handlers(batches: loop.BatchServicer) -> "grpc.GenericRpcHandler[bytes, bytes]":
    """Build the handlers by hand, since the generated registration would have PullBatch parsed."""
    return grpc.method_handlers_generic_handler(
        "rollout_buffer.v1.BatchService",
        {
            "PullBatch": grpc.unary_stream_rpc_method_handler(batches.PullBatch),
            "Reject": _unary(batches.Reject, batches_pb2.RejectRequest, batches_pb2.RejectResponse),
            "Commit": _unary(batches.Commit, batches_pb2.CommitRequest, batches_pb2.CommitResponse),
            "Checkpoint": _unary(batches.Checkpoint, batches_pb2.CheckpointRequest, batches_pb2.CheckpointResponse),
            "Resume": _unary(batches.Resume, batches_pb2.ResumeRequest, batches_pb2.ResumeResponse),
        },
    )


def _weight_handlers(weights: loop.WeightServicer) -> "grpc.GenericRpcHandler[bytes, bytes]":
    """Build the handlers by hand, since the generated registration would serialize a message for each that watches."""
    return grpc.method_handlers_generic_handler(
        "rollout_buffer.v1.WeightService",
        {
            "Publish": _unary(weights.Publish, weights_pb2.PublishRequest, weights_pb2.PublishResponse),
            "WatchWeights": grpc.unary_stream_rpc_method_handler(
                weights.WatchWeights, weights_pb2.WatchWeightsRequest.FromString
            ),
            "PlanCollective": _unary(
                weights.PlanCollective, weights_pb2.PlanCollectiveRequest, weights_pb2.PlanCollectiveResponse
            ),
            "ReportEngine": _unary(
                weights.ReportEngine, weights_pb2.ReportEngineRequest, weights_pb2.ReportEngineResponse
            ),
        },
    )


def _unary(behavior: Any, request: type[Message], response: type[Message]) -> Any:  # noqa: ANN401 - the stubs know no asyncio behaviors
    return grpc.unary_unary_rpc_method_handler(behavior, request.FromString, response.SerializeToString)
