"""Reading of a run: as it was sent, as the words for it need it, and as JSON values."""

from typing import Any

from buffer_cli.calls import Calls
from buffer_cli.output import values_of
from buffer_service.domain.ops import RunView
from buffer_service.observability.diagnosis import Situation, waits_on
from buffer_service.rpc.convert.runs import view_of
from rollout_buffer.v1 import runs_pb2


def read(calls: Calls, run_id: str) -> tuple[runs_pb2.Run, RunView]:
    """A run as it was sent, and as the words for it need it. Raises RolloutBufferError."""
    reply = calls.get(run_id)
    return reply.run, view_of(reply.run, reply.revision)


def as_values(run: runs_pb2.Run, view: RunView) -> dict[str, Any]:
    """A run as JSON values."""
    return {**values_of(run), "waits_on": waits_on(Situation.of(view))}
