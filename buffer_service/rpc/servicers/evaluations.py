"""The RPCs of evaluations: parse, call the store, encode. Errors are translated by the interceptor."""

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc.aio

from buffer_service import commands
from buffer_service.domain import evaluations as ev
from buffer_service.domain import ops
from buffer_service.domain.ports import RunStore, Topic
from buffer_service.observability.metrics import RpcMetrics
from buffer_service.rpc.convert import evaluations as convert
from buffer_service.rpc.convert import fields
from buffer_service.rpc.flow.budget import StreamSlots
from buffer_service.rpc.flow.drain import Drain
from buffer_service.rpc.flow.waiting import Lines
from buffer_service.rpc.streams import evaluation as evaluation_stream
from buffer_service.security.gate import caller
from buffer_wire.revision import Revision
from rollout_buffer.v1 import evaluations_pb2 as pb
from rollout_buffer.v1 import evaluations_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

_RECHECK_S = 10.0
"""Longest time between tries to lease. Every engine of every run waits here, nearly always for nothing."""
_BACK_OFF_RECHECK_S = 0.5
_POINTLESS = frozenset({ops.LeaseWait.PAUSED, ops.LeaseWait.QUARANTINED})
"""Reasons that are told at once: no hint comes when they end."""


@dataclass(frozen=True, slots=True)
class EvaluationServicer(evaluations_pb2_grpc.EvaluationServiceServicer):
    """Servicer of evaluations."""

    store: RunStore
    lines: Lines
    drain: Drain
    slots: StreamSlots
    metrics: RpcMetrics
    max_payload_bytes: int

    async def SubmitEvaluation(self, request: pb.SubmitEvaluationRequest, _: Context) -> pb.SubmitEvaluationResponse:
        """Add an evaluation."""
        run_id, seen = fields.run_ref(request.run)
        submit = convert.submit(request)
        return convert.to_submitted(
            await self.store.call(commands.submit_evaluation(run_id, submit, seen_revision=seen))
        )

    async def GetEvaluation(self, request: pb.GetEvaluationRequest, _: Context) -> pb.GetEvaluationResponse:
        """Reply with the progress of an evaluation."""
        run_id = fields.run_id(request.run.run_id)
        revision, view = await self.store.call(commands.evaluation(run_id, convert.eval_id(request.eval_id)))
        return pb.GetEvaluationResponse(
            revision=revision, revision_proof=revision.proof, evaluation=convert.to_evaluation(view)
        )

    async def ReadEvaluation(  # type: ignore[override]
        self, request: pb.ReadEvaluationRequest, context: Context
    ) -> None:
        """Stream the results of an evaluation."""
        run_id, eval_id = fields.run_id(request.run.run_id), convert.eval_id(request.eval_id)
        wait_s = fields.number(request.wait_ms, "wait_ms", 0, 3_600_000) / 1000
        read = evaluation_stream.results(self.store, self.lines, run_id, eval_id, seen=request.seen, wait_s=wait_s)
        with self.slots.slot(caller().token_id):
            async with aclosing(read):
                async for message in read:
                    await context.write(message)

    async def ListEvaluations(self, request: pb.ListEvaluationsRequest, _: Context) -> pb.ListEvaluationsResponse:
        """List all evaluations of a run."""
        revision, views = await self.store.call(commands.evaluations(fields.run_id(request.run.run_id)))
        return pb.ListEvaluationsResponse(
            revision=revision,
            revision_proof=revision.proof,
            evaluations=[convert.to_evaluation(view) for view in views],
        )

    async def DeleteEvaluation(self, request: pb.DeleteEvaluationRequest, _: Context) -> pb.DeleteEvaluationResponse:
        """Delete an evaluation."""
        run_id, seen = fields.run_ref(request.run)
        revision = await self.store.call(
            commands.delete_evaluation(run_id, convert.eval_id(request.eval_id), seen_revision=seen)
        )
        return pb.DeleteEvaluationResponse(revision=revision, revision_proof=revision.proof)

    async def LeaseEvaluation(self, request: pb.LeaseEvaluationRequest, _: Context) -> pb.LeaseEvaluationResponse:
        """Lease tasks, waiting for the first."""
        run_id, seen = fields.run_ref(request.run)
        ask = convert.ask(request)
        self.drain.refuse()
        return convert.to_leased(await self._leased(run_id, ask, seen, request.wait_ms / 1000))

    async def _leased(self, run_id: str, ask: ev.EvaluationAsk, seen: Revision, wait_s: float) -> ev.EvaluationLeased:
        # Nobody waits in a line here: what the head of it cannot use, the next one may.
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            ticket = self.lines.ticket(run_id, Topic.EVALUATIONS)
            leased = await self.store.call(commands.lease_evaluation(run_id, ask, seen_revision=seen))
            told = leased.grants or leased.wanted or leased.wait is None or leased.wait in _POINTLESS
            if told or loop.time() >= deadline:
                return leased
            longest_s = _BACK_OFF_RECHECK_S if leased.wait is ops.LeaseWait.BACKING_OFF else _RECHECK_S
            await self.lines.hint(run_id, Topic.EVALUATIONS, ticket, deadline, longest_s)

    async def ExtendEvaluation(self, request: pb.ExtendEvaluationRequest, _: Context) -> pb.ExtendEvaluationResponse:
        """Prolong leases of an evaluation's tasks: a heartbeat."""
        run_id, seen = fields.run_ref(request.run)
        return convert.to_extended(
            await self.store.call(commands.extend_evaluation(run_id, *convert.extend(request), seen_revision=seen))
        )

    async def FinishEvaluation(self, request: pb.FinishEvaluationRequest, _: Context) -> pb.FinishEvaluationResponse:
        """End a lease of an evaluation's task."""
        run_id, seen = fields.run_ref(request.run)
        finish = convert.finish(request, self.max_payload_bytes)
        revision, outcome = await self.store.call(commands.finish_evaluation(run_id, finish, seen_revision=seen))
        self.metrics.evaluated(outcome)
        return convert.to_finished(revision, outcome)
