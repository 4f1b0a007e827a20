"""Calls of the service for commands: RunService's here, those of a folder's commands there."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc

from buffer_cli.access import access
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

    def __init__(self, channel: grpc.Channel, address: str, timeout_s: float) -> None:
        self.channel = channel
        self.address = address
        self._timeout_s = timeout_s

    def call(self, method: "grpc.UnaryUnaryMultiCallable[RequestT, ReplyT]", request: RequestT) -> ReplyT:
        """Call a method of a stub; waits at most as long as the command may."""
        try:
            return method(request, timeout=self._timeout_s)
        except grpc.RpcError as failure:
            raise self._error(failure) from None

    def _error(self, failure: Any) -> RolloutBufferError:  # noqa: ANN401 - RpcError's status is not in its type
        error = error_of(failure.code(), failure.details(), failure.trailing_metadata())
        if isinstance(error, ServiceUnreachable):
            return ServiceUnreachable(
                f"the service at {self.address} does not answer ({error.message})", **error.attributes
            )
        return error


class RunCalls(Calls):
    """Calls of RunService."""

    def __init__(self, channel: grpc.Channel, address: str, timeout_s: float) -> None:
        super().__init__(channel, address, timeout_s)
        self._stub = runs_pb2_grpc.RunServiceStub(channel)

    def list(self) -> list[str]:
        """Ids of all runs, in order."""
        return list(self.call(self._stub.ListRuns, runs_pb2.ListRunsRequest()).run_ids)

    def get(self, run_id: str) -> runs_pb2.GetRunResponse:
        """The whole state of a run."""
        return self.call(self._stub.GetRun, runs_pb2.GetRunRequest(run=run_ref(run_id)))

    def create(self, run_id: str, policy: runs_pb2.RunPolicy) -> runs_pb2.CreateRunResponse:
        """Create a run, or find it with the same policy."""
        return self.call(self._stub.CreateRun, runs_pb2.CreateRunRequest(run_id=run_id, policy=policy))

    def update(self, run_id: str, policy: runs_pb2.RunPolicy, names: Collection[str]) -> runs_pb2.RunPolicy:
        """Replace the named fields of the policy, or all where none is named; returns the effective one."""
        request = runs_pb2.UpdatePolicyRequest(run=run_ref(run_id), policy=policy, fields=sorted(names))
        return self.call(self._stub.UpdatePolicy, request).policy

    def pause(self, run_id: str) -> None:
        """Hold a run."""
        self.call(self._stub.PauseRun, runs_pb2.PauseRunRequest(run=run_ref(run_id)))

    def drain(self, run_id: str) -> None:
        """Let a run end."""
        self.call(self._stub.DrainRun, runs_pb2.DrainRunRequest(run=run_ref(run_id)))

    def continue_(self, run_id: str) -> None:
        """Let a run go on."""
        self.call(self._stub.ContinueRun, runs_pb2.ContinueRunRequest(run=run_ref(run_id)))

    def delete(self, run_id: str) -> None:
        """Delete a run."""
        self.call(self._stub.DeleteRun, runs_pb2.DeleteRunRequest(run=run_ref(run_id)))

    @contextmanager
    def export(
        self, run_id: str, after: str, *, include_groups: bool
    ) -> Iterator[Iterator[runs_pb2.ExportRecordsResponse]]:
        """The events of a run's recording after one of them, to the end of what is there."""
        request = runs_pb2.ExportRecordsRequest(run=run_ref(run_id), after=after, include_groups=include_groups)
        stream: Any = self._stub.ExportRecords(request, timeout=EXPORT_TIMEOUT_S)
        try:
            yield stream
        except grpc.RpcError as failure:
            raise self._error(failure) from None
        finally:
            stream.cancel()


def run_ref(run_id: str) -> common_pb2.RunRef:
    """A reference to a run."""
    return common_pb2.RunRef(run_id=run_id)


CallsT = TypeVar("CallsT", bound=Calls)


@contextmanager
def calling(calls: type[CallsT], address: str, timeout_s: float) -> Iterator[CallsT]:
    """Calls of this kind over a channel of their own; each waits at most `timeout_s`."""
    with Connector(address, access()).blocking() as channel:
        yield calls(channel, address, timeout_s)
