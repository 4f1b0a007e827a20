"""The model's operations on evaluations, in the shape of commands.evaluating."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from buffer_service.domain import evaluations as ev
from buffer_wire.revision import NO_REVISION, Revision
from tests.oracle import evaluations
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
        """List all of them; the model has no replicas to wait for."""
        run = self._known(run_id)
        return run.signed_revision, evaluations.views(run)

    def evaluation(self, run_id: str, eval_id: str) -> tuple[Revision, ev.EvaluationView]:
        """Pick one of them."""
        run = self._known(run_id)
        return run.signed_revision, evaluations.view(evaluations.find(run, eval_id))

    def evaluation_results(self, run_id: str, eval_id: str, start: int, limit: int) -> ev.EvaluationResults:
        """Ended tasks."""
        return evaluations.results(self._known(run_id), eval_id, start, limit)

    def delete_evaluation(self, run_id: str, eval_id: str, *, seen_revision: Revision = NO_REVISION) -> Revision:
        """End it, delete its results."""
        return evaluations.delete(self._begin(run_id, seen_revision), eval_id)
