"""Calls of InspectService for commands: single things, and lists page by page."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc

from buffer_cli.calls import Calls, RunCalls
from buffer_wire.errors import InvalidField, RolloutBufferError
from rollout_buffer.v1 import inspect_pb2 as pb
from rollout_buffer.v1 import inspect_pb2_grpc

PAGE = 256
"""Things in one call at most."""

ItemT = TypeVar("ItemT", pb.TaskInfo, pb.GroupInfo, pb.StepInfo)


@dataclass(frozen=True, slots=True)
class Listed(Generic[ItemT]):
    """Items of a list, without repeats; `next_page_token` is empty when that is all."""

    items: list[ItemT]
    next_page_token: str
    revision: int
    now_ms: int


class InspectCalls(Calls):
    """Calls of InspectService: single things by its stub, lists by the methods here."""

    def __init__(self, channel: grpc.Channel, address: str, timeout_s: float) -> None:
        super().__init__(channel, address, timeout_s)
        self.stub = inspect_pb2_grpc.InspectServiceStub(channel)
        self.runs = RunCalls(channel, address, timeout_s)

    def run_id(self, given: str | None) -> str:
        """The run that is meant: the given one, or the only one. Raises InvalidField."""
        if given:
            return given
        run_ids = self.runs.list()
        if len(run_ids) != 1:
            known = f"one of {', '.join(run_ids)}" if run_ids else f"a run; the service at {self.address} has none yet"
            raise InvalidField("--run", "not given", known)
        return run_ids[0]

    def tasks(self, request: pb.ListTasksRequest, limit: int) -> Listed[pb.TaskInfo]:
        """Tasks of a set, from the request's page on."""
        return _listed(lambda: self.call(self.stub.ListTasks, request), request, limit, "tasks", "task_id")

    def groups(self, request: pb.ListGroupsRequest, limit: int) -> Listed[pb.GroupInfo]:
        """Groups of the queue, or of a step."""
        return _listed(lambda: self.call(self.stub.ListGroups, request), request, limit, "groups", "group_id")

    def batches(self, request: pb.ListBatchesRequest, limit: int) -> Listed[pb.StepInfo]:
        """Steps."""
        return _listed(lambda: self.call(self.stub.ListBatches, request), request, limit, "steps", "step")

    def _error(self, failure: Any) -> RolloutBufferError:  # noqa: ANN401 - RpcError's status is not in its type
        if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
            return RolloutBufferError(
                f"the service at {self.address} is older than `inspect`: it has no InspectService"
            )
        return super()._error(failure)


def _listed(
    call: Callable[[], Any],
    request: pb.ListTasksRequest | pb.ListGroupsRequest | pb.ListBatchesRequest,
    limit: int,
    name: str,
    identity: str,
) -> Listed[Any]:
    """List about `limit` items (0: all), in as many pages as it takes; of one that comes again, the later state."""
    found: dict[object, Any] = {}
    while True:
        request.page_size = min(PAGE, limit - len(found)) if limit else PAGE
        reply = call()
        found |= {getattr(item, identity): item for item in getattr(reply, name)}
        request.page_token = reply.next_page_token
        if not reply.next_page_token or (limit and len(found) >= limit):
            return Listed(list(found.values()), reply.next_page_token, reply.revision, reply.now_ms)
