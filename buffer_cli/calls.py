"""Calls of the service for commands: RunService's here, those of a folder's commands there."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc

from buffer_cli.options import CallOptions
from buffer_wire.connection.channels import Connector
from buffer_wire.errors import RolloutBufferError
from buffer_wire.status import ServiceUnreachable, error_of
from rollout_buffer.v1 import common_pb2, runs_pb2, runs_pb2_grpc

EXPORT_TIMEOUT_S = 3_600.0
"""Longest time for all of a recording."""


RequestT = TypeVar("RequestT")
ReplyT = TypeVar("ReplyT")


class Calls:
    """Calls of the service at one address. Every one raises RolloutBufferError."""

    def __init__(self, channel: grpc.Channel, options: CallOptions) -> None:
        self.channel = channel
        self.address = options.address
        self.runs = runs_pb2_grpc.RunServiceStub(channel)
        self._timeout_s = options.timeout_s

    def call(self, method: "grpc.UnaryUnaryMultiCallable[RequestT, ReplyT]", request: RequestT) -> ReplyT:
        """Call a method of a stub; waits at most as long as the command may."""
        try:
            return method(request, timeout=self._timeout_s)
        except grpc.RpcError as failure:
            raise self._error(failure) from None

    def list(self) -> list[str]:
        """Ids of all runs, in order."""
        return list(self.call(self.runs.ListRuns, runs_pb2.ListRunsRequest()).run_ids)

    def get(self, run_id: str) -> runs_pb2.GetRunResponse:
        """The whole state of a run."""
        return self.call(self.runs.GetRun, runs_pb2.GetRunRequest(run=run_ref(run_id)))

    @contextmanager
    def export(
        self, run_id: str, after: str, *, include_groups: bool
    ) -> Iterator[Iterator[runs_pb2.ExportRecordsResponse]]:
        """The events of a run's recording after one of them, to the end of what is there."""
        request = runs_pb2.ExportRecordsRequest(run=run_ref(run_id), after=after, include_groups=include_groups)
        stream: Any = self.runs.ExportRecords(request, timeout=EXPORT_TIMEOUT_S)
        try:
            yield stream
        except grpc.RpcError as failure:
            raise self._error(failure) from None
        finally:
            stream.cancel()

    def _error(self, failure: Any) -> RolloutBufferError:  # noqa: ANN401 - RpcError's status is not in its type
        error = error_of(failure.code(), failure.details(), failure.trailing_metadata())
        if isinstance(error, ServiceUnreachable):
            return ServiceUnreachable(
                f"the service at {self.address} does not answer ({error.message})", **error.attributes
            )
        return error


def run_ref(run_id: str) -> common_pb2.RunRef:
    """A reference to a run."""
    return common_pb2.RunRef(run_id=run_id)


CallsT = TypeVar("CallsT", bound=Calls)


@contextmanager
def calling(calls: type[CallsT], options: CallOptions) -> Iterator[CallsT]:
    """Calls of this kind over a channel of their own."""
    with Connector(options.address, options.access).blocking() as channel:
        yield calls(channel, options)
