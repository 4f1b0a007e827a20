"""Errors that tell where a run stands: somebody else leads it, it is not ready, it is paused, data is gone."""

from collections.abc import Mapping

from buffer_wire.errors.base import RolloutBufferError


class Fenced(RolloutBufferError):
    """Somebody else has taken over; stop."""

    reason = "fenced"
    code = "FAILED_PRECONDITION"


class StaleTerm(Fenced):
    """The caller's term is not the run's, or that of a deleted run of the same name. Attributes: term, current."""

    reason = "stale_term"

    def __init__(self, term: int, current: int) -> None:
        why = "another trainer has resumed it" if term != current else "this one is of a deleted run of the same name"
        super().__init__(
            f"term is {term} but the run is at term {current}: {why}",
            term=term,
            current=current,
        )


class NotReady(RolloutBufferError):
    """Not yet: a repeat of the request can succeed; with `process` "full" sooner on a new connection.
    Attributes: process.
    """

    reason = "not_ready"
    code = "UNAVAILABLE"
    retryable = True


class BatchNotReady(NotReady):
    """The deadline of a pull passed. Attributes: step, queued_groups, needed_groups, leased, pending, waits_on."""

    reason = "batch_not_ready"
    code = "DEADLINE_EXCEEDED"

    def __init__(
        self, *, step: int, queued_groups: int, needed_groups: int, leased: int, pending: int, waits_on: str
    ) -> None:
        super().__init__(
            f"step {step} is not ready: {queued_groups} of {needed_groups} groups are queued, "
            f"{leased} tasks are being generated and {pending} are pending; waiting on {waits_on}",
            step=step,
            queued_groups=queued_groups,
            needed_groups=needed_groups,
            leased=leased,
            pending=pending,
            waits_on=waits_on,
        )


class EvaluationNotReady(NotReady):
    """The deadline of a wait for an evaluation passed. Attributes: eval_id, ended, tasks, waits_on."""

    reason = "evaluation_not_ready"
    code = "DEADLINE_EXCEEDED"

    def __init__(self, *, eval_id: str, ended: int, tasks: int, waits_on: str) -> None:
        super().__init__(
            f"evaluation {eval_id!r} is not done: {ended} of {tasks} tasks have ended; waiting on {waits_on}",
            eval_id=eval_id,
            ended=ended,
            tasks=tasks,
            waits_on=waits_on,
        )


class PendingFull(NotReady):
    """The pending tasks have reached their cap. Attributes: pending, limit."""

    reason = "pending_full"
    code = "RESOURCE_EXHAUSTED"

    def __init__(self, pending: int, limit: int) -> None:
        super().__init__(
            f"{pending} tasks are pending and the run's max_pending_tasks is {limit}; submit later",
            pending=pending,
            limit=limit,
        )


class PolicyChanged(NotReady):
    """Others changed the policy while some fields of it were being changed. Attributes: run_id."""

    reason = "policy_changed"
    code = "ABORTED"

    def __init__(self, run_id: str) -> None:
        super().__init__(
            f"the policy of run {run_id!r} was changed by somebody else meanwhile; ask again", run_id=run_id
        )


class CollectiveFailed(NotReady):
    """No engine received a broadcast version; raised by the trainer's client. Attributes: version, engines."""

    reason = "collective_failed"
    code = "UNAVAILABLE"

    def __init__(self, version: int, failed: Mapping[str, str], why: str) -> None:
        engines = "; ".join(f"{engine_id}: {reason}" for engine_id, reason in failed.items()) or "none failed by itself"
        super().__init__(
            f"version {version} could not be broadcast: {why}; engines left out: {engines}",
            version=version,
            engines=",".join(failed),
        )


class RunPaused(RolloutBufferError):
    """The run does nothing until somebody acts. Attributes: run_id, why."""

    reason = "run_paused"
    code = "FAILED_PRECONDITION"

    def __init__(self, run_id: str, why: str) -> None:
        super().__init__(f"run {run_id!r} is paused: {why}", run_id=run_id, why=why)


class StoreRolledBack(RunPaused):
    """The store is behind what it has acknowledged. Attributes: run_id, seen_revision, revision."""

    reason = "store_rolled_back"
    code = "DATA_LOSS"

    def __init__(self, run_id: str, seen_revision: int, revision: int) -> None:
        RolloutBufferError.__init__(
            self,
            f"the store of run {run_id!r} stands at revision {revision} but has acknowledged {seen_revision}: "
            "acknowledged writes are lost; resume the run to go on",
            run_id=run_id,
            seen_revision=seen_revision,
            revision=revision,
        )


class FailureBudgetExceeded(RunPaused):
    """More tasks failed than the policy allows. Attributes: failed, budget, last_error."""

    reason = "failure_budget_exceeded"

    def __init__(self, failed: int, budget: int, last_error: str) -> None:
        RolloutBufferError.__init__(
            self,
            f"{failed} tasks have failed and the failure budget is {budget}; the last error: {last_error}",
            failed=failed,
            budget=budget,
            last_error=last_error,
        )


class ReplayGap(RolloutBufferError):
    """A step's replay data is gone. Attributes: step, first_retained."""

    reason = "replay_gap"
    code = "OUT_OF_RANGE"

    def __init__(self, step: int, first_retained: int) -> None:
        super().__init__(
            f"step {step} cannot be replayed: data before step {first_retained} is freed; resume at a later step, "
            "or with allow_regenerate",
            step=step,
            first_retained=first_retained,
        )
