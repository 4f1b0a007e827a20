"""Every integer of every request, at the ends of its type: refused by its name, or harmless."""

import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from buffer_service.rpc.server import SERVICE_NAMES
from buffer_wire.errors import RolloutBufferError
from buffer_wire.status import error_of
from rollout_buffer.v1 import runs_pb2, weights_pb2
from tests.support.rpc import TIMEOUT_S, Rpc, RunRpc, make_group, make_plan, make_task, manifest
from tests.support.service import ServiceProcess

WIDE = {FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1), FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1)}
NARROW = {FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1), FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1)}
RANGES = WIDE | NARROW
VALUES = (-(2**63), -(2**31), -1, 2**31 - 1, 2**32 - 1, 2**53 - 1, 2**53, 2**63 - 1, 2**64 - 1)
BROKEN = frozenset({"INTERNAL", "UNKNOWN"})
BITS = "checksum"
"""Field of a pushed group that nobody counts with: any 64 bits will do."""


def methods() -> Iterator[MethodDescriptor]:
    for service in SERVICE_NAMES:
        yield from Default().FindServiceByName(service).methods


def filled(run: RunRpc, method: MethodDescriptor) -> Any:
    """A request that is accepted, or refused for a reason that comes after its integers."""
    request: Any = GetMessageClass(method.input_type)()
    if "run" in method.input_type.fields_by_name:
        request.run.CopyFrom(run.ref)
    for field in method.input_type.fields:
        if field.name in COMMON:
            setattr(request, field.name, COMMON[field.name])
    if method.name == "CreateRun":
        request.run_id = f"{run.run_id}.other"
    elif method.name in {"SubmitTasks", "SubmitEvaluation"}:
        request.tasks.append(make_task())
    elif method.name == "PushGroup":
        request.group.CopyFrom(make_group("x"))
    elif method.name == "PushGroups":
        request.sequence = 1
        request.groups.append(make_group("x"))
    elif method.name == "Publish":
        request.version = 1
        request.manifest.CopyFrom(manifest())
    elif method.name == "PlanCollective":
        request.plan.CopyFrom(make_plan())
    elif method.name == "ReportEngine":
        request.report.engine_id = request.report.worker_id = "e"
        request.report.state = weights_pb2.ENGINE_STATE_READY
    return request


COMMON: dict[str, Any] = {
    "term": 1,
    "request_id": "r",
    "worker_id": "w",
    "instance_id": "i",
    "engine_id": "e",
    "eval_id": "e",
    "lease_id": "x/0/1",
    "task_id": "x",
    "group_id": "x/0",
    "world_size": 1,
}


def places(kind: Any, path: Sequence[str] = ()) -> Iterator[tuple[Sequence[str], FieldDescriptor]]:
    """Paths of all integers of a message, and of the messages in it."""
    for field in kind.fields:
        assert not (field.message_type and field.message_type.GetOptions().map_entry), "maps would need a look"
        if field.cpp_type in RANGES:
            yield (*path, field.name), field
        elif field.message_type:
            yield from places(field.message_type, (*path, field.name))


def put(message: Any, path: Sequence[str], value: int) -> None:
    """Set an integer; repeated fields get a first entry where they have none."""
    for name in path[:-1]:
        child = getattr(message, name)
        message = child if isinstance(child, Message) else (child[0] if len(child) else child.add())
        if name == "stored":
            message.nonce = bytes(16)
    current = getattr(message, path[-1])
    if isinstance(current, int):
        setattr(message, path[-1], value)
    else:
        del current[:]
        current.append(value)


def call(rpc: Rpc, method: MethodDescriptor, message: bytes) -> RolloutBufferError | None:
    """Return what the call is refused with, or what the group in it is; None when all is accepted."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    reply = GetMessageClass(method.output_type)
    try:
        if method.name == "WatchWeights":
            stream = rpc.channel.unary_stream(path, None, reply.FromString)(message, timeout=TIMEOUT_S)
            next(stream)
            stream.cancel()
            return None
        calls = rpc.channel.stream_stream(path, None, reply.FromString)(iter([message]), timeout=TIMEOUT_S)
        answers: list[Any] = list(calls)
    except grpc.RpcError as raised:
        error: Any = raised
        return error_of(error.code(), error.details(), error.trailing_metadata())
    acks = [ack for answer in answers for ack in getattr(answer, "acks", ())]
    acks += [answer.ack for answer in answers if hasattr(answer, "ack")]
    for ack in acks:
        if ack.HasField("error"):
            return RolloutBufferError(ack.error.message, **dict(ack.error.attributes))
    return None


@pytest.mark.parametrize("method", list(methods()), ids=lambda method: method.name)
def test_no_integer_breaks_anything(rpc: Rpc, service: ServiceProcess, method: MethodDescriptor) -> None:
    run = rpc.create(batch_groups=1)
    found = 0
    for path, field in places(method.input_type):
        low, high = RANGES[field.cpp_type]
        for value in VALUES:
            if not low <= value <= high:
                continue
            request = filled(run, method)
            put(request, path, value)
            any_will_do = path[-1] == BITS and method.name in {"PushGroup", "PushGroups"}
            if any_will_do:
                group = request.group if method.name == "PushGroup" else request.groups[0]
                group.ClearField("payload")
            said = f"{method.name} {'.'.join(path)} = {value}"
            error = call(rpc, method, request.SerializeToString())
            found += 1
            if error is None:
                assert abs(value) < 2**53 or any_will_do, f"{said} is accepted"
                continue
            assert not any_will_do, f"{said}: {error!r}"
            assert error.code not in BROKEN or "field" in error.attributes, f"{said}: {error!r}"
            if abs(value) >= 2**53:
                # Named by the field itself, or by the whole that it is a part of.
                named = error.attributes.get("field", "").replace("[0]", "").split(".")
                assert set(named) & set(path), f"{said}: {error!r}"
    if found:
        works(rpc, service, method.name, run)


def works(rpc: Rpc, service: ServiceProcess, method: str, run: RunRpc) -> None:
    """The run goes on, whatever its trainer has just said to it, and nobody else has noticed anything."""
    if method != "DeleteRun":
        rpc.runs.ContinueRun(runs_pb2.ContinueRunRequest(run=run.ref), timeout=TIMEOUT_S)
        assert run.get().paused == ""
        run.resume(allow_regenerate=True)
        if method != "UpdatePolicy":
            run.push([make_group("last")])
            assert run.pull(run.get().next_step)[0].total_groups == 1
    other = rpc.create(batch_groups=1)
    other.push([make_group("x")])
    assert len(other.pull(0)[1]) == 1
    with urllib.request.urlopen(f"{service.admin}/metrics", timeout=TIMEOUT_S) as answer:
        text = answer.read().decode()
    assert (f'rollout_buffer_revision{{run="{run.run_id}"}}' in text) == (method != "DeleteRun")
    unread = [line for line in text.splitlines() if line.startswith("rollout_buffer_runs_unread{")]
    assert all(line.endswith(" 0.0") for line in unread)
