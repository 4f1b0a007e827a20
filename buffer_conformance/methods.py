"""RPCs of the contract by their short names, with paths and message classes, taken from the descriptors."""

from collections.abc import Mapping
from dataclasses import dataclass

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from rollout_buffer.v1 import (
    batches_pb2,
    evaluations_pb2,
    groups_pb2,
    inspect_pb2,
    payloads_pb2,
    runs_pb2,
    tasks_pb2,
    weights_pb2,
)

_FILES = (
    *(batches_pb2, evaluations_pb2, groups_pb2, inspect_pb2),
    *(payloads_pb2, runs_pb2, tasks_pb2, weights_pb2),
)


@dataclass(frozen=True, slots=True)
class Method:
    """An RPC of the contract: its name, path and message classes."""

    name: str
    path: str
    request: type[Message]
    reply: type[Message]


def _methods(service: ServiceDescriptor) -> dict[str, Method]:
    return {
        method.name: Method(
            method.name,
            f"/{service.full_name}/{method.name}",
            GetMessageClass(method.input_type),
            GetMessageClass(method.output_type),
        )
        for method in service.methods
    }


METHODS: Mapping[str, Method] = {
    name: method
    for module in _FILES
    for service in module.DESCRIPTOR.services_by_name.values()
    for name, method in _methods(service).items()
}
"""RPCs by short name; short names are unique over the services of the contract."""

BY_PATH: Mapping[str, Method] = {method.path: method for method in METHODS.values()}
