"""The RPCs of evaluations: parse, call the store, encode. Errors are translated by the interceptor."""

from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc.aio

from buffer_service import commands
from buffer_service.domain.ports import RunStore
from buffer_service.rpc.convert import evaluations as convert
from buffer_service.rpc.convert import fields
from buffer_service.rpc.flow.budget import StreamSlots
from buffer_service.rpc.flow.waiting import WaitingLines
from buffer_service.rpc.streams import evaluation as evaluation_stream
from buffer_service.security.gate import caller
from buffer_wire.messages import message_of
from rollout_buffer.v1 import evaluations_pb2 as pb
from rollout_buffer.v1 import evaluations_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class EvaluationServicer(evaluations_pb2_grpc.EvaluationServiceServicer):
    """Servicer of evaluations."""

    store: RunStore
    lines: WaitingLines
    slots: StreamSlots

    async def SubmitEvaluation(self, request: pb.SubmitEvaluationRequest, _: Context) -> pb.SubmitEvaluationResponse:
        """Add an evaluation."""
        run_id, seen = fields.run_ref(request.run)
        submit = convert.submit(request)
        submitted = await self.store.call(commands.submit_evaluation(run_id, submit, seen_revision=seen))
        return fields.reply(pb.SubmitEvaluationResponse, submitted)

    async def GetEvaluation(self, request: pb.GetEvaluationRequest, _: Context) -> pb.GetEvaluationResponse:
        """Reply with the progress of an evaluation."""
        run_id = fields.run_id(request.run.run_id)
        revision, view = await self.store.call(commands.evaluation(run_id, convert.eval_id(request.eval_id)))
        return pb.GetEvaluationResponse(
            revision=revision, revision_proof=revision.proof, evaluation=message_of(pb.Evaluation, view)
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
            evaluations=[message_of(pb.Evaluation, view) for view in views],
        )

    async def DeleteEvaluation(self, request: pb.DeleteEvaluationRequest, _: Context) -> pb.DeleteEvaluationResponse:
        """Delete an evaluation."""
        run_id, seen = fields.run_ref(request.run)
        revision = await self.store.call(
            commands.delete_evaluation(run_id, convert.eval_id(request.eval_id), seen_revision=seen)
        )
        return pb.DeleteEvaluationResponse(revision=revision, revision_proof=revision.proof)
