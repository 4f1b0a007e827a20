"""The model's operations on evaluations, in the shape of commands.evaluating."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from buffer_service.domain import evaluations as ev
from buffer_service.domain import ops
from buffer_wire.revision import NO_REVISION, Revision
from tests.oracle import evaluation_leases, evaluations
from tests.oracle.state import RunState


class EvaluationOperations(ABC):
    """A part of the model; methods mirror commands.evaluating."""

    @abstractmethod
    def _known(self, run_id: str) -> RunState:
        """The run. Raises UnknownRun."""

    @abstractmethod
    def _begin(self, run_id: str, seen_revision: Revision = NO_REVISION) -> RunState:
        """The run, at the time of this operation."""

    def submit_evaluation(
        self, run_id: str, submit: ev.SubmitEvaluation, *, seen_revision: Revision = NO_REVISION
    ) -> ev.EvaluationSubmitted:
        """Add an evaluation, or find it."""
        return evaluations.submit(self._begin(run_id, seen_revision), submit)

    def evaluations(self, run_id: str, *, acknowledges: bool = True) -> tuple[Revision, Sequence[ev.EvaluationView]]:
        """All of them; the model has no replicas to wait for."""
        run = self._known(run_id)
        return run.signed_revision, evaluations.views(run)

    def evaluation(self, run_id: str, eval_id: str) -> tuple[Revision, ev.EvaluationView]:
        """One of them."""
        run = self._known(run_id)
        return run.signed_revision, evaluations.view(evaluations.find(run, eval_id))

    def evaluation_results(self, run_id: str, eval_id: str, start: int, limit: int) -> ev.EvaluationResults:
        """Ended tasks."""
        return evaluations.results(self._known(run_id), eval_id, start, limit)

    def delete_evaluation(self, run_id: str, eval_id: str, *, seen_revision: Revision = NO_REVISION) -> Revision:
        """End it, delete its results."""
        return evaluations.delete(self._begin(run_id, seen_revision), eval_id)

    def lease_evaluation(
        self, run_id: str, ask: ev.EvaluationAsk, *, seen_revision: Revision = NO_REVISION
    ) -> ev.EvaluationLeased:
        """Lease tasks."""
        return evaluation_leases.lease(self._begin(run_id, seen_revision), ask)

    def extend_evaluation(
        self,
        run_id: str,
        worker_id: str,
        instance_id: str,
        lease_ids: Sequence[str],
        *,
        seen_revision: Revision = NO_REVISION,
    ) -> ops.Extended:
        """Prolong leases that are live."""
        return evaluation_leases.extend(self._begin(run_id, seen_revision), worker_id, instance_id, lease_ids)

    def finish_evaluation(
        self, run_id: str, finish: ev.FinishEvaluation, *, seen_revision: Revision = NO_REVISION
    ) -> tuple[Revision, ev.EvaluationOutcome]:
        """End a lease."""
        return evaluation_leases.finish(self._begin(run_id, seen_revision), finish)
