"""Heartbeats of one worker: what its engines' leases and reports have to say at the same time goes in one call.

Whoever speaks first takes the others along: riders that have been silent for half of their time speak then too. So a
worker sends one call every third of a lease's time, however many engines it has. What is said alone, or to a service of
before there was such a call, goes by calls of its own. So does what was refused together: no wrong part fails others.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc

from buffer_wire.connection.retry import rpc_error
from buffer_wire.errors import PermissionDenied, RolloutBufferError
from buffer_wire.limits import MAX_PARTS_OF_HEARTBEAT
from rollout_buffer.v1 import common_pb2, tasks_pb2, tasks_pb2_grpc, weights_pb2, weights_pb2_grpc

GATHER_S = 0.005
"""Time for which the first one waits for those that ride along."""

AGAIN_S = 600.0
"""Time after which a service that knew no such call is asked again: it may be another version by then."""

_Request: TypeAlias = tasks_pb2.ExtendLeasesRequest | weights_pb2.ReportEngineRequest
_Answer: TypeAlias = tasks_pb2.ExtendLeasesResponse | weights_pb2.ReportEngineResponse


@dataclass(slots=True)
class _Part:
    request: _Request
    timeout_s: float
    answer: "asyncio.Future[Any]"


class Heartbeats:
    """Calls ExtendLeases and ReportEngine on `channel`, joined. `ref`: the run, as of now."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        ref: Callable[[], common_pb2.RunRef],
        worth_waiting: Callable[[RolloutBufferError], bool],
    ) -> None:
        self._tasks = tasks_pb2_grpc.TaskServiceStub(channel)
        self._weights = weights_pb2_grpc.WeightServiceStub(channel)
        self._ref = ref
        self._worth_waiting = worth_waiting
        self._parts: list[_Part] = []
        self._riders: list[Callable[[], None]] = []
        self._sending: set[asyncio.Task[None]] = set()
        self._apart_until = 0.0

    @contextmanager
    def riding(self, ride: Callable[[], None]) -> Iterator[None]:
        """Call `ride` whenever a heartbeat is about to go: who has something to say soon says it then."""
        self._riders.append(ride)
        try:
            yield
        finally:
            self._riders.remove(ride)

    def extend(
        self, request: tasks_pb2.ExtendLeasesRequest, timeout_s: float
    ) -> Awaitable[tasks_pb2.ExtendLeasesResponse]:
        """Reply to a request, which names no run. Raises grpc.RpcError."""
        return self._joined(request, timeout_s)

    def report(
        self, request: weights_pb2.ReportEngineRequest, timeout_s: float
    ) -> Awaitable[weights_pb2.ReportEngineResponse]:
        """Reply to a request, which names no run. Raises grpc.RpcError."""
        return self._joined(request, timeout_s)

    def close(self) -> None:
        """End what is under way, and what is being gathered."""
        for sending in self._sending:
            sending.cancel()
        for part in self._parts:
            part.answer.cancel()
        self._parts = []

    def _joined(self, request: _Request, timeout_s: float) -> "asyncio.Future[Any]":
        part = _Part(request, timeout_s, asyncio.get_running_loop().create_future())
        self._parts.append(part)
        if len(self._parts) == 1:
            sending = asyncio.create_task(self._send(), name="heartbeat")
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)
            for ride in list(self._riders):
                ride()
        return part.answer

    async def _send(self) -> None:
        await asyncio.sleep(GATHER_S)
        parts, self._parts = [part for part in self._parts if not part.answer.done()], []
        try:
            if len(parts) < 2 or len(parts) > MAX_PARTS_OF_HEARTBEAT or time.monotonic() < self._apart_until:
                await self._each(parts)
            else:
                await self._together(parts)
        except asyncio.CancelledError:
            for part in parts:
                part.answer.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - whoever waits for an answer raises it
            _fail(parts, error)

    async def _together(self, parts: Sequence[_Part]) -> None:
        request = tasks_pb2.HeartbeatRequest(run=self._ref())
        extensions: list[_Part] = []
        reports: list[_Part] = []
        for part in parts:
            if isinstance(part.request, tasks_pb2.ExtendLeasesRequest):
                extensions.append(part)
                request.extensions.append(part.request)
            else:
                reports.append(part)
                request.reports.append(part.request)
        try:
            reply = await self._tasks.Heartbeat(request, timeout=min(part.timeout_s for part in parts))
        except grpc.RpcError as raised:
            error = rpc_error(raised)
            if self._worth_waiting(error):
                _fail(parts, raised)
                return
            # With tokens, one of before lets nobody call what it does not know.
            if error.attributes.get("status") == "UNIMPLEMENTED" or isinstance(error, PermissionDenied):
                self._apart_until = time.monotonic() + AGAIN_S
            await self._each(parts)
            return
        answers: list[_Answer] = [*reply.extended, *reply.reported]
        for part, answer in zip([*extensions, *reports], answers, strict=True):
            answer.revision, answer.revision_proof = reply.revision, reply.revision_proof
            if not part.answer.done():
                part.answer.set_result(answer)

    async def _each(self, parts: Sequence[_Part]) -> None:
        await asyncio.gather(*(self._alone(part) for part in parts))

    async def _alone(self, part: _Part) -> None:
        part.request.run.CopyFrom(self._ref())
        extends = isinstance(part.request, tasks_pb2.ExtendLeasesRequest)
        call: Any = self._tasks.ExtendLeases if extends else self._weights.ReportEngine
        try:
            answer = await call(part.request, timeout=part.timeout_s)
        except grpc.RpcError as raised:
            _fail([part], raised)
            return
        if not part.answer.done():
            part.answer.set_result(answer)


def _fail(parts: Sequence[_Part], error: Exception) -> None:
    for part in parts:
        if not part.answer.done():
            part.answer.set_exception(error)
