"""The trainer's side of evaluations: submit, look, read, delete."""

from buffer_service.domain.evaluations import (
    FAILURES_SHOWN,
    MAX_EVALUATIONS,
    MAX_STORED_BYTES,
    EvaluationFailure,
    EvaluationResult,
    EvaluationResults,
    EvaluationSubmitted,
    EvaluationView,
    SubmitEvaluation,
)
from buffer_service.domain.ops import WeightVersion
from buffer_wire.errors import EvaluationExists, EvaluationsFull, InvalidField, UnknownEvaluation
from buffer_wire.revision import Revision
from tests.oracle import evaluation_leases
from tests.oracle.evaluation_book import Evaluation, Task
from tests.oracle.state import RunState


def submit(run: RunState, request: SubmitEvaluation) -> EvaluationSubmitted:
    """Add an evaluation, or find it."""
    run.require_term(request.term)
    run.require_store()
    book = run.evaluations
    known = book.evaluations.get(request.eval_id)
    if known is not None:
        if known.digest != request.digest:
            raise EvaluationExists(run.run_id, request.eval_id)
        return EvaluationSubmitted(run.settle(), view(known), created=False)
    if len(book.evaluations) >= MAX_EVALUATIONS:
        raise EvaluationsFull("evaluations", MAX_EVALUATIONS + 1, MAX_EVALUATIONS)
    size = sum(len(task.spec) for task in request.tasks)
    if book.stored_bytes + size > MAX_STORED_BYTES:
        raise EvaluationsFull("stored_bytes", book.stored_bytes + size, MAX_STORED_BYTES)
    version, manifest = _pinned(run, request.version)
    evaluation = book.evaluations[request.eval_id] = Evaluation(
        eval_id=request.eval_id,
        number=run.next_sequence(),
        version=WeightVersion(run.term, version),
        digest=request.digest,
        manifest=manifest,
        created_ms=run.now,
        tasks=[Task(index, task.task_id, task.group_size, task.spec) for index, task in enumerate(request.tasks)],
        stored_bytes=size,
    )
    run.changed = True
    return EvaluationSubmitted(run.settle(), view(evaluation), created=True)


def _pinned(run: RunState, version: int | None) -> tuple[int, bytes]:
    """The version to evaluate, and its manifest."""
    published = run.published.version
    manifests = {one.version: one.manifest for one in run.publishes} | {published: run.manifest}
    wanted = published if version is None else version
    manifest = manifests.get(wanted, b"")
    if wanted > published or (wanted not in (0, published) and not manifest):
        limit = f"{published}, the published version, or an earlier one whose manifest the run still has"
        raise InvalidField("version", wanted, limit)
    return wanted, manifest


def find(run: RunState, eval_id: str) -> Evaluation:
    """An evaluation that is there."""
    evaluation = run.evaluations.evaluations.get(eval_id)
    if evaluation is None:
        raise UnknownEvaluation(run.run_id, eval_id)
    return evaluation


def view(evaluation: Evaluation, *, with_failures: bool = True) -> EvaluationView:
    """Tell how far it is."""
    failed = [task for task in evaluation.ended if task.state == "failed"] if with_failures else []
    return EvaluationView(
        eval_id=evaluation.eval_id,
        version=evaluation.version,
        tasks=len(evaluation.tasks),
        pending=evaluation.count("pending"),
        leased=evaluation.count("leased"),
        finished=evaluation.count("finished"),
        failed=evaluation.count("failed"),
        stored_bytes=evaluation.stored_bytes,
        created_ms=evaluation.created_ms,
        failures=[EvaluationFailure(t.index, t.task_id, t.attempt, t.error) for t in failed[:FAILURES_SHOWN]],
    )


def views(run: RunState) -> list[EvaluationView]:
    """List all of them, in order of submission."""
    return [view(evaluation, with_failures=False) for evaluation in run.evaluations.evaluations.values()]


def results(run: RunState, eval_id: str, start: int, limit: int) -> EvaluationResults:
    """Ended tasks, in order of their ending."""
    evaluation = find(run, eval_id)
    ended = [
        EvaluationResult(
            task.index, task.task_id, task.attempt, "" if task.payload_key else task.error, task.payload_key
        )
        for task in evaluation.ended[start : start + limit]
    ]
    return EvaluationResults(run.signed_revision, view(evaluation), ended)


def delete(run: RunState, eval_id: str) -> Revision:
    """Delete an evaluation; its leases are lost."""
    evaluation = find(run, eval_id)
    del run.evaluations.evaluations[eval_id]
    for task in evaluation.tasks:
        if task.payload_key:
            run.payloads.trash(task.payload_key)
        evaluation_leases.close(run, task)
    run.changed = True
    return run.settle()
