"""Calls of any RPC of the contract, with any token, about any run; built from the descriptors."""

from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor

from rollout_buffer.v1 import (
    batches_pb2,
    evaluations_pb2,
    groups_pb2,
    inspect_pb2,
    payloads_pb2,
    runs_pb2,
    stages_pb2,
    tasks_pb2,
    weights_pb2,
)

FILES = (
    runs_pb2,
    tasks_pb2,
    groups_pb2,
    payloads_pb2,
    batches_pb2,
    weights_pb2,
    evaluations_pb2,
    inspect_pb2,
    stages_pb2,
)

METHODS: dict[str, MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
PATHS = sorted(METHODS)


def request(path: str, run_id: str) -> Any:
    """The smallest request about a run."""
    made: Any = message_factory.GetMessageClass(METHODS[path].input_type)()
    if "run" in METHODS[path].input_type.fields_by_name:
        made.run.run_id = run_id
    elif "run_id" in METHODS[path].input_type.fields_by_name:
        made.run_id = run_id
    return made


def call(
    channel: grpc.Channel, path: str, token: str | None, *run_ids: str, timeout_s: float = 20.0
) -> tuple[grpc.StatusCode, str]:
    """(status, details) of a call with a message about each of the runs; of a stream that lasts, its first answer."""
    method = METHODS[path]
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    messages = [request(path, run_id).SerializeToString() for run_id in run_ids]
    make: Any = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }[method.client_streaming, method.server_streaming]
    sent: Any = iter(messages) if method.client_streaming else messages[0]
    try:
        answer = make(path)(sent, metadata=metadata, timeout=timeout_s)
        if method.server_streaming:
            _first(answer)
    except grpc.RpcError as raised:
        error: Any = raised
        return error.code(), error.details()
    return grpc.StatusCode.OK, ""


def _first(answer: Any) -> None:
    try:
        next(iter(answer), None)
    finally:
        answer.cancel()
