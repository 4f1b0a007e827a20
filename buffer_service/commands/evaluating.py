"""Commands on evaluations."""

from collections.abc import Sequence

from buffer_service.commands.replies import pack, text
from buffer_service.domain import evaluations as ev
from buffer_service.domain import ops
from buffer_service.domain.command import Command, Fields
from buffer_wire.revision import NO_REVISION, Revision

PUBLISHED = -1


def submit_evaluation(
    run_id: str, submit: ev.SubmitEvaluation, *, seen_revision: Revision = NO_REVISION
) -> Command[ev.EvaluationSubmitted]:
    """Add an evaluation, or find it.

    Raises StaleTerm, EvaluationExists, EvaluationsFull, RunPaused, InvalidField (version).
    """
    arguments = pack(
        seen_revision,
        submit.term,
        submit.eval_id,
        PUBLISHED if submit.version is None else submit.version,
        submit.digest,
        [(task.task_id, task.group_size, task.spec) for task in submit.tasks],
    )
    return Command(run_id, "eval_submit", arguments, _submitted)


def evaluations(run_id: str, *, acknowledges: bool = True) -> Command[tuple[Revision, Sequence[ev.EvaluationView]]]:
    """Revision, and all evaluations in order of submission, without their failures. Unless it `acknowledges`, it waits
    for no replicas, and the revision is not to be sent back.
    """
    return Command(run_id, "eval_view", pack(""), _views, reads=True, acknowledges=acknowledges)


def evaluation(run_id: str, eval_id: str) -> Command[tuple[Revision, ev.EvaluationView]]:
    """Revision, and one evaluation. Raises UnknownEvaluation."""

    def one(tag: str, fields: Fields) -> tuple[Revision, ev.EvaluationView]:
        revision, (view,) = _views(tag, fields)
        return revision, view

    return Command(run_id, "eval_view", pack(eval_id), one, reads=True)


def evaluation_results(run_id: str, eval_id: str, start: int, limit: int) -> Command[ev.EvaluationResults]:
    """Up to `limit` ended tasks after the first `start`; `fetch` has their bodies. Raises UnknownEvaluation."""
    return Command(run_id, "eval_read", pack(eval_id, start, limit), _results)


def delete_evaluation(run_id: str, eval_id: str, *, seen_revision: Revision = NO_REVISION) -> Command[Revision]:
    """End an evaluation and delete its results; returns the revision. Raises UnknownEvaluation."""
    rest = Command(run_id, "eval_delete", pack(NO_REVISION, ""), _revision)
    return Command(run_id, "eval_delete", pack(seen_revision, eval_id), _revision, rest=rest)


def _revision(_tag: str, fields: Fields) -> Revision:
    revision: Revision
    revision, _ = fields
    return revision


def _submitted(_tag: str, fields: Fields) -> ev.EvaluationSubmitted:
    revision, created, evaluation = fields
    return ev.EvaluationSubmitted(revision, _view(evaluation), bool(created))


def _views(_tag: str, fields: Fields) -> tuple[Revision, Sequence[ev.EvaluationView]]:
    revision, evaluations = fields
    return revision, [_view(evaluation) for evaluation in evaluations]


def _results(_tag: str, fields: Fields) -> ev.EvaluationResults:
    revision, evaluation, results = fields
    return ev.EvaluationResults(
        revision,
        _view(evaluation),
        [
            ev.EvaluationResult(index, text(task_id), attempts, text(error), text(key))
            for index, task_id, attempts, error, key in results
        ],
    )


def _view(fields: Fields) -> ev.EvaluationView:
    eval_id, term, version, tasks, pending, finished, failed, stored_bytes, created_ms, failures = fields
    return ev.EvaluationView(
        eval_id=text(eval_id),
        version=ops.WeightVersion(term, version),
        tasks=tasks,
        pending=pending,
        leased=tasks - pending - finished - failed,
        finished=finished,
        failed=failed,
        stored_bytes=stored_bytes,
        created_ms=created_ms,
        failures=[
            ev.EvaluationFailure(index, text(task_id), attempts, text(error))
            for index, task_id, attempts, error in failures
        ],
    )
