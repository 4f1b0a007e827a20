"""Operations on evaluations."""

from collections.abc import Sequence
from typing import cast

from buffer_service.domain import evaluations as ev
from buffer_service.domain import ops
from buffer_service.store.base import StoreBase
from buffer_service.store.keys import new_payload_key
from buffer_service.store.replies import Fields, pack, text
from buffer_wire.revision import NO_REVISION, Revision

PUBLISHED = -1


class EvaluationOps(StoreBase):
    """Submit, look, delete; lease, extend, finish."""

    async def submit_evaluation(
        self, run_id: str, submit: ev.SubmitEvaluation, *, seen_revision: Revision = NO_REVISION
    ) -> ev.EvaluationSubmitted:
        """See domain.evaluations.EvaluationStore.submit_evaluation."""
        arguments = pack(
            seen_revision,
            submit.epoch,
            submit.eval_id,
            PUBLISHED if submit.version is None else submit.version,
            submit.digest,
            [(task.task_id, task.group_size, task.spec) for task in submit.tasks],
        )
        _, (revision, created, evaluation) = await self._call("eval_submit", run_id, arguments)
        return ev.EvaluationSubmitted(revision, _view(evaluation), bool(created))

    async def evaluations(
        self, run_id: str, *, acknowledges: bool = True
    ) -> tuple[Revision, Sequence[ev.EvaluationView]]:
        """See domain.evaluations.EvaluationStore.evaluations."""
        _, (revision, evaluations) = await self._call("eval_view", run_id, pack(""), acknowledges=acknowledges)
        return revision, [_view(evaluation) for evaluation in evaluations]

    async def evaluation(self, run_id: str, eval_id: str) -> tuple[Revision, ev.EvaluationView]:
        """See domain.evaluations.EvaluationStore.evaluation."""
        _, (revision, (evaluation,)) = await self._call("eval_view", run_id, pack(eval_id))
        return revision, _view(evaluation)

    async def evaluation_results(self, run_id: str, eval_id: str, start: int, limit: int) -> ev.EvaluationResults:
        """See domain.evaluations.EvaluationStore.evaluation_results."""
        _, (revision, evaluation, results) = await self._call("eval_read", run_id, pack(eval_id, start, limit))
        return ev.EvaluationResults(
            revision,
            _view(evaluation),
            [
                ev.EvaluationResult(index, text(task_id), attempts, text(error), text(key))
                for index, task_id, attempts, error, key in results
            ],
        )

    async def delete_evaluation(self, run_id: str, eval_id: str, *, seen_revision: Revision = NO_REVISION) -> Revision:
        """See domain.evaluations.EvaluationStore.delete_evaluation."""
        _, (revision, more) = await self._call("eval_delete", run_id, pack(seen_revision, eval_id))
        while more:
            _, (_, more) = await self._call("eval_delete", run_id, pack(NO_REVISION, ""))
        return cast("Revision", revision)

    async def lease_evaluation(
        self, run_id: str, ask: ev.EvaluationAsk, *, seen_revision: Revision = NO_REVISION
    ) -> ev.EvaluationLeased:
        """See domain.evaluations.EvaluationStore.lease_evaluation."""
        arguments = pack(
            seen_revision,
            ask.worker_id,
            ask.instance_id,
            ask.request_id,
            ask.engine_id,
            ask.loaded.epoch,
            ask.loaded.version,
            ask.max_tasks,
            int(ask.would_load),
        )
        tag, fields = "more", Fields()
        while tag == "more":
            tag, fields = await self._call("eval_lease", run_id, arguments)
        revision, wait, ttl_ms, grants, wanted = fields
        return ev.EvaluationLeased(
            revision=revision,
            grants=[
                ev.EvaluationGrant(text(lease_id), text(task_id), ops.WeightVersion(epoch, version), attempt, spec)
                for lease_id, task_id, epoch, version, attempt, spec in grants
            ],
            wait=ops.LeaseWait(text(wait)) if wait else None,
            wanted=ev.Wanted(ops.WeightVersion(wanted[0], wanted[1]), wanted[2]) if wanted else None,
            ttl_ms=ttl_ms,
        )

    async def extend_evaluation(
        self,
        run_id: str,
        worker_id: str,
        instance_id: str,
        lease_ids: Sequence[str],
        *,
        seen_revision: Revision = NO_REVISION,
    ) -> ops.Extended:
        """See domain.evaluations.EvaluationStore.extend_evaluation."""
        arguments = pack(seen_revision, worker_id, instance_id, list(lease_ids))
        _, (revision, ttl_ms, states) = await self._call("eval_extend", run_id, arguments)
        return ops.Extended(revision, [ops.LeaseState(text(state)) for state in states], ttl_ms)

    async def finish_evaluation(
        self, run_id: str, finish: ev.FinishEvaluation, *, seen_revision: Revision = NO_REVISION
    ) -> tuple[Revision, ev.EvaluationOutcome]:
        """See domain.evaluations.EvaluationStore.finish_evaluation."""
        payloads = []
        if finish.kind is ev.FinishKind.GROUP:
            payloads.append((new_payload_key(run_id, len(finish.body)), finish.body))
        arguments = pack(
            seen_revision,
            finish.worker_id,
            finish.instance_id,
            finish.lease_id,
            finish.kind.value,
            finish.error,
            payloads[0][0] if payloads else "",
            finish.task_id,
            finish.samples,
            finish.head.epoch,
            finish.head.version,
            finish.tail.epoch,
            finish.tail.version,
            len(finish.body),
        )
        _, (revision, outcome) = await self._call_with_payloads("eval_finish", run_id, arguments, payloads)
        return revision, ev.EvaluationOutcome(text(outcome))


def _view(fields: Fields) -> ev.EvaluationView:
    eval_id, epoch, version, tasks, pending, finished, failed, stored_bytes, created_ms, failures = fields
    return ev.EvaluationView(
        eval_id=text(eval_id),
        version=ops.WeightVersion(epoch, version),
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
