"""Reading of a run: as it was sent, as the words for it need it, and as JSON values."""

from typing import Any

from google.protobuf.json_format import MessageToDict

from buffer_cli.calls import RunCalls
from buffer_service.domain.ops import RunView
from buffer_service.observability.diagnosis import Standing, waits_on
from buffer_service.rpc.convert.runs import view_of
from rollout_buffer.v1 import runs_pb2


def read(runs: RunCalls, run_id: str) -> tuple[runs_pb2.Run, RunView]:
    """A run as it was sent, and as the words for it need it. Raises RolloutBufferError."""
    reply = runs.get(run_id)
    return reply.run, view_of(reply.run, reply.revision)


def as_values(run: runs_pb2.Run, view: RunView) -> dict[str, Any]:
    """A run as JSON values."""
    values = MessageToDict(run, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return {**values, "waits_on": waits_on(Standing.of(view))}
