"""Errors after which the caller must change the request."""

from buffer_wire.errors.base import RolloutBufferError


class InvalidRequest(RolloutBufferError):
    """The request cannot succeed without being changed."""

    reason = "invalid_request"
    code = "INVALID_ARGUMENT"


def _in_short(text: str, most: int = 120) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


class InvalidField(InvalidRequest):
    """A field breaks its bound. Attributes: field, value, limit."""

    reason = "invalid_field"

    def __init__(self, field: str, value: object, limit: str) -> None:
        shown = _in_short(repr(value) if isinstance(value, str) else str(value))
        field = _in_short(field, 400)  # Names that a caller made up may be in it.
        super().__init__(f"{field} is {shown}; it must be {limit}", field=field, value=shown, limit=limit)


class InvalidPolicy(InvalidRequest):
    """A policy that contradicts itself or could not progress. Attributes: field, why."""

    reason = "invalid_policy"

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"policy refused at {field}: {why}", field=field, why=why)


class UnknownRun(InvalidRequest):
    """No run has that id. Attributes: run_id."""

    reason = "unknown_run"
    code = "NOT_FOUND"

    def __init__(self, run_id: str) -> None:
        super().__init__(
            f"there is no run {run_id!r}; create it first: create_run, or a session with a policy", run_id=run_id
        )


class UnprovenRevision(InvalidRequest):
    """The caller claims a revision that the run does not have, without its proof: that of an earlier run of the name,
    perhaps. Forget it and ask again. Attributes: run_id, seen_revision, revision.
    """

    reason = "unproven_revision"
    code = "FAILED_PRECONDITION"

    def __init__(self, run_id: str, seen_revision: int, revision: int) -> None:
        super().__init__(
            f"revision {seen_revision:d} was claimed without the proof that run {run_id!r}, which stands at "
            f"{revision:d}, has given it out; forget it and ask again",
            run_id=run_id,
            seen_revision=int(seen_revision),
            revision=revision,
        )


class RunExists(InvalidRequest):
    """The run exists with another policy. Attributes: run_id, differs."""

    reason = "run_exists"
    code = "ALREADY_EXISTS"

    def __init__(self, run_id: str, differs: str) -> None:
        super().__init__(
            f"run {run_id!r} exists with another policy (differs in {differs}); leave the policy out to go on with the "
            "run's, or change the run's (update_policy, rollout-buffer run policy)",
            run_id=run_id,
            differs=differs,
        )


class UnknownLease(InvalidRequest):
    """The lease id was never given out, or its task is long gone. Attributes: lease_id."""

    reason = "unknown_lease"
    code = "NOT_FOUND"

    def __init__(self, lease_id: str) -> None:
        super().__init__(f"lease {lease_id!r} is not known to this run", lease_id=lease_id)


class UnknownTask(InvalidRequest):
    """The run has no task of that id, or has freed it. Attributes: run_id, task_id."""

    reason = "unknown_task"
    code = "NOT_FOUND"

    def __init__(self, run_id: str, task_id: str) -> None:
        super().__init__(f"run {run_id!r} has no task {task_id!r} (any more)", run_id=run_id, task_id=task_id)


class UnknownGroup(InvalidRequest):
    """The run has accepted no group of that id, or its payload is gone. Attributes: run_id, group_id."""

    reason = "unknown_group"
    code = "NOT_FOUND"

    def __init__(self, run_id: str, group_id: str) -> None:
        super().__init__(f"run {run_id!r} has no group {group_id!r} (any more)", run_id=run_id, group_id=group_id)


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


class UnknownBlob(InvalidRequest):
    """The run has no blob of that SHA-256. Attributes: run_id, sha256."""

    reason = "unknown_blob"
    code = "NOT_FOUND"

    def __init__(self, run_id: str, sha256: str) -> None:
        super().__init__(f"run {run_id!r} has no blob of SHA-256 {sha256!r}", run_id=run_id, sha256=sha256)


class BlobsFull(InvalidRequest):
    """The blobs of a run would have more bytes than they may. Attributes: value, limit."""

    reason = "blobs_full"
    code = "RESOURCE_EXHAUSTED"

    def __init__(self, value: int, limit: int) -> None:
        super().__init__(
            f"the run's blobs would have {value} bytes and the limit is {limit}; name images by URL or path",
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
    """World size is fixed per term. Attributes: world_size, expected."""

    reason = "world_size_mismatch"
    code = "FAILED_PRECONDITION"

    def __init__(self, world_size: int, expected: int) -> None:
        super().__init__(
            f"world_size is {world_size} but this term pulls with {expected}; resume to change it",
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
