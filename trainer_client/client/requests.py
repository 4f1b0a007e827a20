"""Builders of calls: every unary RPC of a trainer or an operator as a value.

A call holds path, request, type and decoding of the reply. Both clients have a method for each builder, with its
signature and its docs; they differ only in how they wait.

Invariant: a call can be repeated as it is. Its identity (request id, manifest bytes) is fixed when it is made; only the
seen revision is filled in anew.
"""

import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from google.protobuf.message import Message

from buffer_wire.enums import words
from buffer_wire.errors import InvalidField, UnknownRun
from buffer_wire.messages import value_of
from rollout_buffer.v1 import batches_pb2, common_pb2, payloads_pb2, runs_pb2, tasks_pb2, weights_pb2
from trainer_client.client import replies
from trainer_client.client.call import Call
from trainer_client.policy import Policy
from trainer_client.state import Published, Rejected, Resumed, RunState, Submitted, TrainerTime
from trainer_client.tasks import Task, blobs_of, tasks_to_wire
from trainer_client.waiting import OnWait

if TYPE_CHECKING:
    from trainer_client.manifest import Manifest
    from trainer_client.publish.collective.plan import CollectivePlan

ReplyT = TypeVar("ReplyT", bound=Message)
T = TypeVar("T")

ResumeMode: TypeAlias = Literal["replay", "requeue", "discard"]
_MODES = words(batches_pb2.ResumeMode)


ACCESS_S = 0.25
"""Longest time, in seconds, over which access to the store is asked for again; the pull is relayed then."""


def new_request_id() -> str:
    """Make the identity of a request, 32 characters."""
    return uuid.uuid4().hex


def create_run(run_id: str, policy: Policy | None = None) -> Call[runs_pb2.CreateRunResponse, RunState]:
    """Create a run, or find it with the same policy. Raises RunExists, InvalidPolicy, InvalidField."""
    wire = (policy or Policy()).to_wire()
    return Call(
        "/rollout_buffer.v1.RunService/CreateRun",
        run_id,
        f"creating run {run_id!r}",
        lambda _: runs_pb2.CreateRunRequest(run_id=run_id, policy=wire),
        runs_pb2.CreateRunResponse,
        lambda reply: replies.run_state(reply.run, reply.revision),
    )


def run(run_id: str, *, timeout_s: float | None = None) -> Call[runs_pb2.GetRunResponse, RunState]:
    """Read the whole state of a run. Raises UnknownRun."""
    return Call(
        "/rollout_buffer.v1.RunService/GetRun",
        run_id,
        f"reading run {run_id!r}",
        lambda ref: runs_pb2.GetRunRequest(run=ref),
        runs_pb2.GetRunResponse,
        lambda reply: replies.run_state(reply.run, reply.revision),
        timeout_s,
    )


def runs() -> Call[runs_pb2.ListRunsResponse, tuple[str, ...]]:
    """List the ids of all runs, in order."""
    return Call(
        "/rollout_buffer.v1.RunService/ListRuns",
        "",
        "listing runs",
        lambda _: runs_pb2.ListRunsRequest(),
        runs_pb2.ListRunsResponse,
        lambda reply: tuple(reply.run_ids),
    )


def update_policy(
    run_id: str, policy: Policy, names: Iterable[str] = ()
) -> Call[runs_pb2.UpdatePolicyResponse, Policy]:
    """Call UpdatePolicy: replace the named fields, or the whole policy where none is named. Raises InvalidField."""
    fields = sorted(names)
    if "preset" in fields:
        raise InvalidField("policy.preset", policy.preset, "part of a whole policy: Policy(preset=...)")
    wire = policy.to_wire()
    return Call(
        "/rollout_buffer.v1.RunService/UpdatePolicy",
        run_id,
        f"changing the policy of run {run_id!r}",
        lambda ref: runs_pb2.UpdatePolicyRequest(run=ref, policy=wire, fields=fields),
        runs_pb2.UpdatePolicyResponse,
        lambda reply: Policy.from_wire(reply.policy),
    )


def _run_alone(
    run_id: str, rpc: str, doing: str, request: Callable[..., Message], reply: type[ReplyT]
) -> Call[ReplyT, None]:
    """Build a call of RunService whose request names only the run."""
    return Call(
        f"/rollout_buffer.v1.RunService/{rpc}",
        run_id,
        f"{doing} run {run_id!r}",
        lambda ref: request(run=ref),
        reply,
        lambda _: None,
    )


def pause_run(run_id: str) -> Call[runs_pb2.PauseRunResponse, None]:
    """Hold a run until `continue_run`: no leases, no submits, no new batches; groups in flight may still arrive."""
    return _run_alone(run_id, "PauseRun", "pausing", runs_pb2.PauseRunRequest, runs_pb2.PauseRunResponse)


def drain_run(run_id: str) -> Call[runs_pb2.DrainRunResponse, None]:
    """Let a run end: no leases and no submits any more; groups that are queued or being generated are still trained."""
    return _run_alone(run_id, "DrainRun", "draining", runs_pb2.DrainRunRequest, runs_pb2.DrainRunResponse)


def continue_run(run_id: str) -> Call[runs_pb2.ContinueRunResponse, None]:
    """Undo `pause_run` and `drain_run`."""
    return _run_alone(run_id, "ContinueRun", "continuing", runs_pb2.ContinueRunRequest, runs_pb2.ContinueRunResponse)


def delete_run(run_id: str) -> Call[runs_pb2.DeleteRunResponse, None]:
    """Delete a run and everything stored for it, irrevocably. Raises UnknownRun."""
    call = _run_alone(run_id, "DeleteRun", "deleting", runs_pb2.DeleteRunRequest, runs_pb2.DeleteRunResponse)
    return replace(call, gone=UnknownRun, renews=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """Submission: tasks and the cursor that moves with them, both or neither."""

    term: int
    expected_cursor: int
    """Cursor as the feeder last knew it."""
    cursor: int
    """Cursor after these tasks; at least expected_cursor."""
    tasks: Sequence[Task]
    """Tasks to submit, 1 to 4,096."""
    feeder_state: bytes = b""
    """Feeder's own state at the new cursor, opaque to the service, at most 64 KiB."""
    request_id: str = ""
    """Identity of the submit, so that a repeat is recognised; empty: a new one."""


def submit_tasks(
    run_id: str, submission: Submission, *, timeout_s: float | None = None, on_wait: OnWait | None = None
) -> Call[tasks_pb2.SubmitTasksResponse, Submitted]:
    """Add tasks and move the feeder's cursor, both or neither.

    Raises PendingFull after `timeout_s`, CursorConflict, StaleTerm, RunPaused, InvalidField.
    """
    request = tasks_pb2.SubmitTasksRequest(
        term=submission.term,
        expected_cursor=submission.expected_cursor,
        cursor=submission.cursor,
        feeder_state=submission.feeder_state,
        request_id=submission.request_id or new_request_id(),
        tasks=tasks_to_wire(submission.tasks),
    )

    def build(ref: common_pb2.RunRef) -> Message:
        request.run.CopyFrom(ref)
        return request

    return Call(
        "/rollout_buffer.v1.TaskService/SubmitTasks",
        run_id,
        f"submitting {len(submission.tasks)} tasks",
        build,
        tasks_pb2.SubmitTasksResponse,
        lambda reply: Submitted(reply.cursor, tuple(reply.task_ids), reply.pending_tasks),
        timeout_s,
        on_wait,
        blobs_before(run_id, submission.term, submission.tasks),
    )


def write_blob(run_id: str, data: bytes) -> Call[payloads_pb2.WriteBlobResponse, str]:
    """Keep bytes, as an encoded image, as a blob of the run, 1 byte to 8 MiB; returns their SHA-256 in hex.

    Raises BlobsFull, InvalidField.
    """
    return _write_blob(run_id, sha256(data).hexdigest(), data)


def _write_blob(run_id: str, digest: str, data: bytes) -> Call[payloads_pb2.WriteBlobResponse, str]:
    return Call(
        "/rollout_buffer.v1.PayloadService/WriteBlob",
        run_id,
        f"writing blob {digest[:12]} of {len(data)} bytes",
        lambda ref: payloads_pb2.WriteBlobRequest(run=ref, sha256=digest, data=data),
        payloads_pb2.WriteBlobResponse,
        lambda _: digest,
    )


def read_blob(run_id: str, digest: str) -> Call[payloads_pb2.ReadBlobResponse, bytes]:
    """Read a blob of the run by its SHA-256. Raises UnknownBlob."""
    return Call(
        "/rollout_buffer.v1.PayloadService/ReadBlob",
        run_id,
        f"reading blob {digest[:12]}",
        lambda ref: payloads_pb2.ReadBlobRequest(run=ref, sha256=digest),
        payloads_pb2.ReadBlobResponse,
        lambda reply: reply.data,
    )


def blobs_before(run_id: str, term: int, tasks: Sequence[Task]) -> "list[tuple[str, Call[Any, Any]]]":
    """Build the calls that write the images that come with tasks, once in a term."""
    blobs = blobs_of(tasks).items()
    return [(f"{term} {digest}", _write_blob(run_id, digest, data)) for digest, data in blobs]


def publish(
    run_id: str,
    *,
    term: int,
    version: int,
    manifest: "Manifest | None" = None,
    commit_through: int | None = None,
    time_spent: TrainerTime | None = None,
) -> Call[weights_pb2.PublishResponse, Published]:
    """Make (term, version) the published weights and commit through a step, in one decision.

    `manifest` None: weights that need no loading. `time_spent`: the trainer's time since it resumed, for the run's
    statistics; None: unknown. Raises VersionConflict, StaleTerm, StepAhead.
    """
    wire = manifest.to_wire() if manifest is not None else None
    return Call(
        "/rollout_buffer.v1.WeightService/Publish",
        run_id,
        f"publishing version {version}",
        lambda ref: weights_pb2.PublishRequest(
            run=ref,
            term=term,
            version=version,
            manifest=wire,
            commit_through_step=commit_through,
            trainer_busy_ms=None if time_spent is None else time_spent.busy_ms,
            trainer_wait_ms=None if time_spent is None else time_spent.wait_ms,
        ),
        weights_pb2.PublishResponse,
        lambda reply: Published(replies.weight_version(reply.published), reply.committed_steps),
    )


def plan_collective(
    run_id: str, *, term: int, plan: "CollectivePlan", timeout_s: float | None = None
) -> Call[weights_pb2.PlanCollectiveResponse, None]:
    """Announce a collective update of the weights to the workers, or its next phase; replaces the plan before.

    `trainer_client.publish.CollectivePublisher` carries it out. Raises VersionConflict, StaleTerm, InvalidField.
    """
    wire = plan.to_wire()
    return Call(
        "/rollout_buffer.v1.WeightService/PlanCollective",
        run_id,
        f"announcing {plan.phase} of version {plan.version.version} to group {plan.membership}",
        lambda ref: weights_pb2.PlanCollectiveRequest(run=ref, term=term, plan=wire),
        weights_pb2.PlanCollectiveResponse,
        lambda _: None,
        timeout_s,
    )


def commit(run_id: str, *, term: int, through_step: int) -> Call[batches_pb2.CommitResponse, int]:
    """Mark every step up to and including `through_step` as trained; returns the steps committed so far."""
    return Call(
        "/rollout_buffer.v1.BatchService/Commit",
        run_id,
        f"committing through step {through_step}",
        lambda ref: batches_pb2.CommitRequest(run=ref, term=term, through_step=through_step),
        batches_pb2.CommitResponse,
        lambda reply: reply.committed_steps,
    )


def reject(
    run_id: str, *, term: int, step: int, group_ids: Sequence[str], reason: str
) -> Call[batches_pb2.RejectResponse, Rejected]:
    """Give groups of a step back, at most 4,096; the step is to get as many others, which are then pulled.

    `group_ids`: empty: only says how the step stands. `reason`: for people, one line. Raises StaleTerm, StepAhead, and
    InvalidField for a group that the step never had; then none is rejected.
    """
    return Call(
        "/rollout_buffer.v1.BatchService/Reject",
        run_id,
        f"rejecting {len(group_ids)} groups of step {step}",
        lambda ref: batches_pb2.RejectRequest(run=ref, term=term, step=step, group_ids=group_ids, reason=reason),
        batches_pb2.RejectResponse,
        replies.rejected,
    )


def checkpoint(run_id: str, *, term: int, through_step: int) -> Call[batches_pb2.CheckpointResponse, int]:
    """Free replay data up to and including `through_step`; returns the steps freed so far.

    Raises NotCommitted, StaleTerm.
    """
    return Call(
        "/rollout_buffer.v1.BatchService/Checkpoint",
        run_id,
        f"checkpointing through step {through_step}",
        lambda ref: batches_pb2.CheckpointRequest(run=ref, term=term, through_step=through_step),
        batches_pb2.CheckpointResponse,
        lambda reply: reply.checkpointed_steps,
    )


def read_access(
    run_id: str, client_id: str, trouble: str
) -> Call[payloads_pb2.PayloadAccess, payloads_pb2.PayloadAccess]:
    """Ask for access to the run's payloads at the store, with the reason why the last could not be used."""
    return Call(
        "/rollout_buffer.v1.PayloadService/GetReadAccess",
        run_id,
        "asking for access to the store",
        lambda ref: payloads_pb2.PayloadAccessRequest(run=ref, client_id=client_id, trouble=trouble, knows_shards=True),
        payloads_pb2.PayloadAccess,
        lambda reply: reply,
        ACCESS_S,
    )


def resume(
    run_id: str, *, next_step: int | None = None, mode: ResumeMode = "replay", allow_regenerate: bool = False
) -> Call[batches_pb2.ResumeResponse, Resumed]:
    """Take the run over: begin a new term, with the clock set back to `next_step` (None: after the last commit).

    Raises StepAhead, ReplayGap unless `allow_regenerate`, and InvalidField for an unknown mode.
    """
    if mode not in _MODES:
        raise InvalidField("mode", mode, "one of " + ", ".join(_MODES))
    request_id = new_request_id()
    return Call(
        "/rollout_buffer.v1.BatchService/Resume",
        run_id,
        f"resuming run {run_id!r}",
        lambda ref: batches_pb2.ResumeRequest(
            run=ref,
            next_step=next_step,
            mode=_MODES[mode],
            request_id=request_id,
            allow_regenerate=allow_regenerate,
        ),
        batches_pb2.ResumeResponse,
        lambda reply: value_of(Resumed, reply),
        renews=True,
    )
