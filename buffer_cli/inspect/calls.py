"""Calls of InspectService for commands: single things, and lists page by page."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import grpc

from buffer_cli.calls import Calls, calling
from buffer_cli.inspect.commands import PageOptions
from buffer_cli.options import CallOptions
from buffer_wire.errors import InvalidField, RolloutBufferError
from rollout_buffer.v1 import inspect_pb2 as pb
from rollout_buffer.v1 import inspect_pb2_grpc

PAGE = 256
"""Things in one call at most."""

ListReply: TypeAlias = pb.ListTasksResponse | pb.ListGroupsResponse | pb.ListBatchesResponse

_IDENTITY = {"tasks": "task_id", "groups": "group_id", "steps": "step"}
"""Field that tells an item of a list from the others, by the list's name."""


class InspectCalls(Calls):
    """Calls of InspectService: single things by its stub, lists by `listed`."""

    def __init__(self, channel: grpc.Channel, options: CallOptions) -> None:
        super().__init__(channel, options)
        self.stub = inspect_pb2_grpc.InspectServiceStub(channel)

    def run_id(self, given: str | None) -> str:
        """The run that is meant: the given one, or the only one. Raises InvalidField."""
        if given:
            return given
        run_ids = self.list()
        if len(run_ids) != 1:
            known = f"one of {', '.join(run_ids)}" if run_ids else f"a run; the service at {self.address} has none yet"
            raise InvalidField("--run", "not given", known)
        return run_ids[0]

    def listed(self, method: Any, request: Any, name: str, page: PageOptions) -> Any:  # noqa: ANN401 - of any list
        """Reply of the last page, with about `page.limit` items (0: all) of as many pages as it takes.

        Of an item that comes again, the later state. Raises InvalidField.
        """
        if page.limit < 0:
            raise InvalidField("--limit", page.limit, "at least 0, which is all")
        found: dict[object, Any] = {}
        request.page_token = page.page_token
        while True:
            request.page_size = min(PAGE, page.limit - len(found)) if page.limit else PAGE
            reply = self.call(method, request)
            found |= {getattr(item, _IDENTITY[name]): item for item in getattr(reply, name)}
            request.page_token = reply.next_page_token
            if not reply.next_page_token or (page.limit and len(found) >= page.limit):
                reply.ClearField(name)
                getattr(reply, name).extend(found.values())
                return reply

    def _error(self, failure: Any) -> RolloutBufferError:  # noqa: ANN401 - RpcError's status is not in its type
        if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
            return RolloutBufferError(
                f"the service at {self.address} is older than `inspect`: it has no InspectService"
            )
        return super()._error(failure)


@contextmanager
def on_run(service: CallOptions, given: str | None) -> Iterator[tuple[InspectCalls, str]]:
    """Calls over a channel of their own, and the run that is meant. Raises InvalidField."""
    with calling(InspectCalls, service) as calls:
        yield calls, calls.run_id(given)
