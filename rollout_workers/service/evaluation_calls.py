"""The worker's calls to the service for evaluations, on the channels and by the rules of `ServiceClient`."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import grpc

from rollout_buffer.v1 import common_pb2, evaluations_pb2_grpc, groups_pb2, tasks_pb2
from rollout_buffer.v1 import evaluations_pb2 as pb
from rollout_workers.versions import Version

R = TypeVar("R")


class _Line(Protocol):
    """Part of ServiceClient that is used here."""

    @property
    def address(self) -> str: ...

    @property
    def instance_id(self) -> str: ...

    @property
    def timeout_s(self) -> float: ...

    def ref(self) -> common_pb2.RunRef: ...

    def wait_log(self, what: str) -> Any: ...  # noqa: ANN401 - a WaitLog

    async def repeat(self, what: str, attempt: Callable[[], Awaitable[Any]], timeout_s: float) -> Any: ...  # noqa: ANN401


class EvaluationCalls:
    """Calls of EvaluationService for one run. `call_timeout_s`: longest wait for one attempt."""

    def __init__(
        self, line: _Line, control: grpc.aio.Channel, bulk: grpc.aio.Channel, *, call_timeout_s: float
    ) -> None:
        self._line = line
        self._control = evaluations_pb2_grpc.EvaluationServiceStub(control)
        self._bulk = evaluations_pb2_grpc.EvaluationServiceStub(bulk)
        self._call_timeout_s = call_timeout_s

    @property
    def address(self) -> str:
        """Address of the service."""
        return self._line.address

    def wait_log(self, what: str) -> Any:  # noqa: ANN401 - a WaitLog
        """The log of waits to `what`."""
        return self._line.wait_log(what)

    async def lease(
        self, holder: str, request_id: str, loaded: Version, *, max_tasks: int, wait_s: float, would_load: bool
    ) -> pb.LeaseEvaluationResponse:
        """Up to `max_tasks` leases of exactly the loaded version for engine `holder`; waits for the first one."""

        def attempt() -> Awaitable[pb.LeaseEvaluationResponse]:
            request = pb.LeaseEvaluationRequest(
                run=self._line.ref(),
                worker_id=holder,
                instance_id=self._line.instance_id,
                request_id=request_id,
                engine_id=holder,
                loaded=loaded.wire(),
                max_tasks=max_tasks,
                wait_ms=round(wait_s * 1000),
                would_load=would_load,
            )
            return self._control.LeaseEvaluation(request, timeout=self._call_timeout_s + wait_s)

        reply: pb.LeaseEvaluationResponse = await self._line.repeat(
            "lease tasks of evaluations", attempt, self._line.timeout_s
        )
        return reply

    async def extend(self, holder: str, lease_ids: Sequence[str], *, timeout_s: float) -> pb.ExtendEvaluationResponse:
        """Heartbeat for leases of `holder`."""

        def attempt() -> Awaitable[pb.ExtendEvaluationResponse]:
            request = pb.ExtendEvaluationRequest(
                run=self._line.ref(), worker_id=holder, instance_id=self._line.instance_id, lease_ids=lease_ids
            )
            return self._control.ExtendEvaluation(request, timeout=min(self._call_timeout_s, timeout_s))

        reply: pb.ExtendEvaluationResponse = await self._line.repeat("extend leases of evaluations", attempt, timeout_s)
        return reply

    async def finish(self, holder: str, lease_id: str, group: groups_pb2.Group) -> "pb.EvaluationOutcome.ValueType":
        """End a lease with its group; what became of the task."""
        return await self._end(holder, pb.FinishEvaluationRequest(lease_id=lease_id, group=group))

    async def hand_back(
        self, holder: str, lease_id: str, kind: "tasks_pb2.ReturnKind.ValueType", error: str = ""
    ) -> "pb.EvaluationOutcome.ValueType":
        """End a lease without a group; what became of the task."""
        back = pb.EvaluationReturn(kind=kind, error=error)
        return await self._end(holder, pb.FinishEvaluationRequest(lease_id=lease_id, handed_back=back))

    async def _end(self, holder: str, request: pb.FinishEvaluationRequest) -> "pb.EvaluationOutcome.ValueType":
        request.worker_id, request.instance_id = holder, self._line.instance_id

        def attempt() -> Awaitable[pb.FinishEvaluationResponse]:
            request.run.CopyFrom(self._line.ref())
            return self._bulk.FinishEvaluation(request, timeout=self._call_timeout_s)

        reply: pb.FinishEvaluationResponse = await self._line.repeat(
            "end leases of evaluations", attempt, self._line.timeout_s
        )
        return reply.outcome
