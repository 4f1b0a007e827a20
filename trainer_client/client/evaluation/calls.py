"""Evaluations as a trainer sees them: calls, states, and the reading of results that both clients share.

Invariants: the caller chooses an evaluation's id, so a submit can be repeated. A reading that was cut goes on after the
last result that it has, so every group comes once.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from google.protobuf.message import Message

from buffer_wire.errors import EvaluationNotReady, UnknownEvaluation
from buffer_wire.revisions import Revisions
from rollout_buffer.v1 import common_pb2
from rollout_buffer.v1 import evaluations_pb2 as pb
from trainer_client.client.call import Call
from trainer_client.client.requests import blobs_before
from trainer_client.forks import CALLS
from trainer_client.state import WeightVersion
from trainer_client.tasks import Task, tasks_to_wire

if TYPE_CHECKING:
    from trainer_client.batch import Group

_SERVICE = "/rollout_buffer.v1.EvaluationService"
READ_METHOD = f"{_SERVICE}/ReadEvaluation"


@dataclass(frozen=True, slots=True)
class EvaluationFailure:
    """Failed task of an evaluation, given up with its last error."""

    task_index: int
    """Position of the task in the submit, from 0."""
    task_id: str
    attempts: int
    error: str


@dataclass(frozen=True, slots=True)
class EvaluationState:
    """State of an evaluation: tasks = pending + leased + finished + failed."""

    eval_id: str
    version: WeightVersion
    """Weight version that generates every token of the evaluation."""
    tasks: int
    pending: int
    leased: int
    finished: int
    failed: int
    stored_bytes: int
    created_ms: int
    failures: tuple[EvaluationFailure, ...]
    """Failed tasks, the first 100; empty in a list of evaluations."""

    @property
    def ended(self) -> int:
        """Number of tasks that have ended, with a group or without one."""
        return self.finished + self.failed

    @property
    def done(self) -> bool:
        """True when all tasks have ended."""
        return self.ended == self.tasks

    @property
    def waits_on(self) -> str:
        """Party that the evaluation waits on; empty when it is done."""
        if self.leased:
            return f"the workers: {self.leased} tasks are being generated, {self.pending} are pending"
        if self.pending:
            return f"a worker that evaluates, with weights {self.version.term}.{self.version.version} loaded"
        return ""

    def not_ready(self) -> EvaluationNotReady:
        """Make the error that a wait for the evaluation ends with."""
        return EvaluationNotReady(eval_id=self.eval_id, ended=self.ended, tasks=self.tasks, waits_on=self.waits_on)


def state_of(wire: pb.Evaluation) -> EvaluationState:
    """Decode the state of an evaluation."""
    return EvaluationState(
        eval_id=wire.eval_id,
        version=WeightVersion(wire.version.term, wire.version.version),
        tasks=wire.tasks,
        pending=wire.pending,
        leased=wire.leased,
        finished=wire.finished,
        failed=wire.failed,
        stored_bytes=wire.stored_bytes,
        created_ms=wire.created_ms,
        failures=tuple(EvaluationFailure(f.task_index, f.task_id, f.attempts, f.error) for f in wire.failures),
    )


def new_eval_id() -> str:
    """Make an id for an evaluation whose caller gives none."""
    return f"eval-{uuid.uuid4().hex[:12]}"


def submit(
    run_id: str, *, term: int, eval_id: str, version: int | None, tasks: Sequence[Task]
) -> Call[pb.SubmitEvaluationResponse, EvaluationState]:
    """Submit an evaluation. Raises InvalidField for a task that cannot be a message."""
    request = pb.SubmitEvaluationRequest(term=term, eval_id=eval_id, version=version, tasks=tasks_to_wire(tasks))

    def build(ref: common_pb2.RunRef) -> Message:
        request.run.CopyFrom(ref)
        return request

    return Call(
        f"{_SERVICE}/SubmitEvaluation",
        run_id,
        f"submitting evaluation {eval_id!r} of {len(tasks)} tasks",
        build,
        pb.SubmitEvaluationResponse,
        lambda reply: state_of(reply.evaluation),
        before=blobs_before(run_id, term, tasks),
    )


def evaluation_state(run_id: str, eval_id: str) -> Call[pb.GetEvaluationResponse, EvaluationState]:
    """Read the state of an evaluation. Raises UnknownEvaluation."""
    return Call(
        f"{_SERVICE}/GetEvaluation",
        run_id,
        f"reading evaluation {eval_id!r}",
        lambda ref: pb.GetEvaluationRequest(run=ref, eval_id=eval_id),
        pb.GetEvaluationResponse,
        lambda reply: state_of(reply.evaluation),
    )


def evaluations(run_id: str) -> Call[pb.ListEvaluationsResponse, tuple[EvaluationState, ...]]:
    """List all evaluations of a run, in order of submission."""
    return Call(
        f"{_SERVICE}/ListEvaluations",
        run_id,
        f"listing the evaluations of run {run_id!r}",
        lambda ref: pb.ListEvaluationsRequest(run=ref),
        pb.ListEvaluationsResponse,
        lambda reply: tuple(state_of(evaluation) for evaluation in reply.evaluations),
    )


def delete_evaluation(run_id: str, eval_id: str) -> Call[pb.DeleteEvaluationResponse, None]:
    """End an evaluation where it is and delete its results. Raises UnknownEvaluation."""
    return Call(
        f"{_SERVICE}/DeleteEvaluation",
        run_id,
        f"deleting evaluation {eval_id!r}",
        lambda ref: pb.DeleteEvaluationRequest(run=ref, eval_id=eval_id),
        pb.DeleteEvaluationResponse,
        lambda _: None,
        gone=UnknownEvaluation,
    )


class Reading:
    """Reading of one evaluation's results, over any number of streams."""

    def __init__(self, run_id: str, revisions: Revisions, state: EvaluationState, *, seen: int = 0) -> None:
        self.state = state
        self._run_id = run_id
        self._revisions = revisions
        self._seen = seen

    @property
    def complete(self) -> bool:
        """True when no more results come."""
        return self._seen >= self.state.tasks and self.state.done

    def request(self, wait_s: float) -> pb.ReadEvaluationRequest:
        """Build the request of a stream that goes on from here, and waits up to `wait_s` for missing results."""
        return pb.ReadEvaluationRequest(
            run=self._revisions.ref(self._run_id),
            eval_id=self.state.eval_id,
            seen=self._seen,
            wait_ms=round(wait_s * 1000),
        )

    def take(self, message: pb.ReadEvaluationResponse) -> "list[Group]":
        """Take the groups of the next message; failed tasks appear in the state's failures."""
        self.state = state_of(message.evaluation)
        self._seen += len(message.results)
        return [self._group(result) for result in message.results if result.HasField("group")]

    def _group(self, result: pb.EvaluationResult) -> "Group":
        with CALLS.under_way():
            from buffer_wire.codec import Delivered
            from trainer_client.batch import Group

        version = self.state.version.version
        delivered = Delivered(result.group.SerializeToString(), result.task_index, version, version)
        return Group.of(delivered, version)
