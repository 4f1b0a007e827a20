"""A RunService that shows one made-up run, and can go away and come back at the same address."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Self

import grpc

from buffer_service.domain import ops
from buffer_service.rpc.convert.runs import to_run
from buffer_wire.errors import UnknownRun
from buffer_wire.status import status_of
from rollout_buffer.v1 import runs_pb2, runs_pb2_grpc
from tests.support.views import make_view


class FakeRuns(runs_pb2_grpc.RunServiceServicer):
    """Each look finds `growth` more of each statistic that it names. `stop` and `start` it, or use it as a context."""

    def __init__(self, **growth: int) -> None:
        self.view: ops.RunView | None = make_view(groups={"queued": ops.Amount(3, 3, 30, 300)}, run_id="math-1")
        self.growth = growth
        self.looks = 0
        self._server: grpc.Server | None = None
        self._port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def start(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 1)])
        runs_pb2_grpc.add_RunServiceServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port(f"127.0.0.1:{self._port}")
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(0).wait(10)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def ListRuns(self, _request: runs_pb2.ListRunsRequest, _: Any) -> runs_pb2.ListRunsResponse:
        return runs_pb2.ListRunsResponse(run_ids=["math-1"])

    def GetRun(self, request: runs_pb2.GetRunRequest, context: Any) -> runs_pb2.GetRunResponse:
        if self.view is None:
            code, details, trailing = status_of(UnknownRun(request.run.run_id))
            context.set_trailing_metadata(trailing)
            context.abort(code, details)
            raise AssertionError("abort raises")
        self.looks += 1
        grown = {name: self.view.statistics[name] + by for name, by in self.growth.items()}
        self.view = replace(self.view, statistics={**self.view.statistics, **grown})
        return runs_pb2.GetRunResponse(revision=self.looks, run=to_run(self.view))
