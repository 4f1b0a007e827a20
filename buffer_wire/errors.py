"""The one error tree of the project: raised by the service's rules, carried by gRPC, raised again by the clients.

    RolloutBufferError
    ├── InvalidRequest                     the caller must change the request
    │   ├── InvalidField                   a field breaks a bound
    │   ├── InvalidPolicy                  a policy under which the run could not progress
    │   ├── UnknownRun / RunExists
    │   ├── UnknownLease
    │   ├── UnknownEvaluation / EvaluationExists / EvaluationsFull
    │   └── StepAhead / WorldSizeMismatch / NotCommitted / VersionConflict / CursorConflict
    ├── Fenced                             somebody else has taken over
    │   └── StaleEpoch
    ├── NotReady                           the same request can succeed later
    │   ├── BatchNotReady / EvaluationNotReady
    │   └── PendingFull / CollectiveFailed
    ├── RunPaused                          needs an operator or a resume
    │   └── StoreRolledBack / FailureBudgetExceeded
    ├── ReplayGap                          replay data is gone
    └── StoreFault                         the store failed, or is not one we can use
        └── StoreUnavailable / StoreUnsuitable / StoreOutOfMemory

Invariants: `reason` is stable and unique; every constructor takes the error's data as keywords and builds the
message itself; `from_wire` of (`reason`, `message`, `attributes`) gives back an instance of the same class.
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar, Self


class RolloutBufferError(Exception):
    """Base of every error of the contract.

    `reason`: stable identifier. `code`: name of the gRPC status code. `retryable`: the same request can succeed
    later. `attributes`: the error's data as text.
    """

    reason: ClassVar[str] = "internal"
    code: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **attributes: object) -> None:
        super().__init__(message)
        self.message = message
        self.attributes: Mapping[str, str] = {k: str(v) for k, v in attributes.items()}

    @classmethod
    def from_wire(cls, message: str, attributes: Mapping[str, str]) -> Self:
        """Rebuild an instance from what travelled, without calling the subclass's constructor."""
        self = cls.__new__(cls)
        RolloutBufferError.__init__(self, message, **attributes)
        return self

    def __reduce__(self) -> tuple[object, ...]:
        """Pickled as it travels: constructors take other arguments than the message."""
        return type(self).from_wire, (self.message, dict(self.attributes)), self.__dict__


class InvalidRequest(RolloutBufferError):
    """The request cannot succeed without being changed."""

    reason = "invalid_request"
    code = "INVALID_ARGUMENT"


class InvalidField(InvalidRequest):
    """A field breaks its bound. Attributes: field, value, limit."""

    reason = "invalid_field"

    def __init__(self, field: str, value: object, limit: str) -> None:
        shown = repr(value) if isinstance(value, str) else str(value)
        shown = shown if len(shown) <= 120 else shown[:117] + "..."
        super().__init__(f"{field} is {shown}; it must be {limit}", field=field, value=shown, limit=limit)


class InvalidPolicy(InvalidRequest):
    """A policy that contradicts itself or could not progress. Attributes: field, why."""

    reason = "invalid_policy"

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"policy refused at {field}: {why}", field=field, why=why)


class UnknownRun(InvalidRequest):
    """No run of that id. Attributes: run_id."""

    reason = "unknown_run"
    code = "NOT_FOUND"

    def __init__(self, run_id: str) -> None:
        super().__init__(f"there is no run {run_id!r}; create it first (RunService.CreateRun)", run_id=run_id)


class RunExists(InvalidRequest):
    """The run exists with another policy. Attributes: run_id, differs."""

    reason = "run_exists"
    code = "ALREADY_EXISTS"

    def __init__(self, run_id: str, differs: str) -> None:
        super().__init__(
            f"run {run_id!r} exists with another policy (differs in {differs}); use UpdatePolicy to change it",
            run_id=run_id,
            differs=differs,
        )


class UnknownLease(InvalidRequest):
    """The lease id was never given out, or its task is long gone. Attributes: lease_id."""

    reason = "unknown_lease"
    code = "NOT_FOUND"

    def __init__(self, lease_id: str) -> None:
        super().__init__(f"lease {lease_id!r} is not known to this run", lease_id=lease_id)


class UnknownEvaluation(InvalidRequest):
    """The run has no evaluation of that id (any more). Attributes: run_id, eval_id."""

    reason = "unknown_evaluation"
    code = "NOT_FOUND"

    def __init__(self, run_id: str, eval_id: str) -> None:
        super().__init__(f"run {run_id!r} has no evaluation {eval_id!r}", run_id=run_id, eval_id=eval_id)


class EvaluationExists(InvalidRequest):
    """The run has an evaluation of that id with other content. Attributes: run_id, eval_id."""

    reason = "evaluation_exists"
    code = "ALREADY_EXISTS"

    def __init__(self, run_id: str, eval_id: str) -> None:
        super().__init__(
            f"run {run_id!r} has an evaluation {eval_id!r} of other tasks or of another version; choose another id",
            run_id=run_id,
            eval_id=eval_id,
        )


class EvaluationsFull(InvalidRequest):
    """The run keeps as much of evaluations as it may. Attributes: what, value, limit."""

    reason = "evaluations_full"
    code = "RESOURCE_EXHAUSTED"

    def __init__(self, what: str, value: int, limit: int) -> None:
        super().__init__(
            f"{what} of the run's evaluations would be {value} and the limit is {limit}; delete evaluations",
            what=what,
            value=value,
            limit=limit,
        )


class StepAhead(InvalidRequest):
    """A step was named before its turn. Attributes: step, next_step."""

    reason = "step_ahead"
    code = "FAILED_PRECONDITION"

    def __init__(self, step: int, next_step: int) -> None:
        super().__init__(
            f"step {step} is not assembled: steps assemble in order and the next one is {next_step}",
            step=step,
            next_step=next_step,
        )


class WorldSizeMismatch(InvalidRequest):
    """World size is fixed per epoch. Attributes: world_size, expected."""

    reason = "world_size_mismatch"
    code = "FAILED_PRECONDITION"

    def __init__(self, world_size: int, expected: int) -> None:
        super().__init__(
            f"world_size is {world_size} but this epoch pulls with {expected}; resume to change it",
            world_size=world_size,
            expected=expected,
        )


class NotCommitted(InvalidRequest):
    """A checkpoint names a step that is not committed. Attributes: step, committed_steps."""

    reason = "not_committed"
    code = "FAILED_PRECONDITION"

    def __init__(self, step: int, committed_steps: int) -> None:
        super().__init__(
            f"cannot checkpoint through step {step}: only steps below {committed_steps} are committed",
            step=step,
            committed_steps=committed_steps,
        )


class VersionConflict(InvalidRequest):
    """A version is not newer, or was published with another manifest. Attributes: version, published."""

    reason = "version_conflict"
    code = "FAILED_PRECONDITION"

    def __init__(self, version: int, published: int) -> None:
        super().__init__(
            f"version {version} cannot be published over {published}: it must be higher, or an exact repeat",
            version=version,
            published=published,
        )


class CursorConflict(InvalidRequest):
    """The feeder's cursor is not the run's. Attributes: expected_cursor, cursor."""

    reason = "cursor_conflict"
    code = "ABORTED"

    def __init__(self, expected_cursor: int, cursor: int) -> None:
        super().__init__(
            f"expected_cursor is {expected_cursor} but the run stands at {cursor}: another feeder moved it",
            expected_cursor=expected_cursor,
            cursor=cursor,
        )


class Fenced(RolloutBufferError):
    """Somebody else has taken over; stop."""

    reason = "fenced"
    code = "FAILED_PRECONDITION"


class StaleEpoch(Fenced):
    """The caller's epoch is not the run's. Attributes: epoch, current."""

    reason = "stale_epoch"

    def __init__(self, epoch: int, current: int) -> None:
        super().__init__(
            f"epoch is {epoch} but the run is at epoch {current}: another trainer has resumed it",
            epoch=epoch,
            current=current,
        )


class NotReady(RolloutBufferError):
    """The same request can succeed later."""

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


class StoreFault(RolloutBufferError):
    """The store failed."""

    reason = "store_fault"


class StoreUnavailable(StoreFault):
    """The store cannot be reached, or is loading. Attributes: store."""

    reason = "store_unavailable"
    code = "UNAVAILABLE"
    retryable = True

    def __init__(self, store: str, why: str) -> None:
        super().__init__(f"the store at {store} does not answer: {why}", store=store)


class StoreUnsuitable(StoreFault):
    """The store must not be used. Attributes: store, why."""

    reason = "store_unsuitable"
    code = "FAILED_PRECONDITION"

    def __init__(self, store: str, why: str) -> None:
        super().__init__(f"the store at {store} is refused: {why}", store=store, why=why)


class NotReplicated(StoreFault):
    """The write is done, but too few replicas of the store have it; the same request waits for them again.

    Attributes: wanted, reached, timeout_ms.
    """

    reason = "not_replicated"
    code = "UNAVAILABLE"
    retryable = True

    def __init__(self, wanted: int, reached: int, timeout_ms: int) -> None:
        super().__init__(
            f"{reached} of the {wanted} replicas of policy.wait_replicas have the write after {timeout_ms} ms",
            wanted=wanted,
            reached=reached,
            timeout_ms=timeout_ms,
        )


class StoreOutOfMemory(StoreFault):
    """The store refused a write for lack of memory; nothing was accepted."""

    reason = "store_out_of_memory"
    code = "RESOURCE_EXHAUSTED"
    retryable = True

    def __init__(self, store: str) -> None:
        super().__init__(f"the store at {store} is out of memory (maxmemory); nothing was accepted", store=store)


def _walk(cls: type[RolloutBufferError]) -> Iterator[type[RolloutBufferError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from _walk(child)


def by_reason() -> dict[str, type[RolloutBufferError]]:
    """Every error of the tree by its reason."""
    return {cls.reason: cls for cls in _walk(RolloutBufferError)}
