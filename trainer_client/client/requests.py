"""Every unary RPC of a trainer or an operator as a value: path, request, type and decoding of the reply.

Both clients run these calls; they differ only in how they wait. Invariant: a call can be repeated as it is, its
identity (request id, manifest bytes) is fixed when it is made; only the seen revision is filled in anew.
"""

import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, Literal, TypeAlias, TypeVar

from google.protobuf.message import Message

from buffer_wire.errors import InvalidField
from buffer_wire.revision import Revision
from buffer_wire.revisions import Revisions
from rollout_buffer.v1 import batches_pb2, common_pb2, runs_pb2, tasks_pb2, weights_pb2
from trainer_client.client import replies
from trainer_client.policy import Policy
from trainer_client.rounds import Place
from trainer_client.state import Published, Resumed, RunState, Submitted, TrainerTime
from trainer_client.tasks import Task, tasks_to_wire

if TYPE_CHECKING:
    from trainer_client.manifest import Manifest
    from trainer_client.publish.collective.plan import CollectivePlan

ReplyT = TypeVar("ReplyT", bound=Message)
T = TypeVar("T")

ResumeMode: TypeAlias = Literal["replay", "requeue", "discard"]
_MODES = {
    "replay": batches_pb2.RESUME_MODE_REPLAY,
    "requeue": batches_pb2.RESUME_MODE_REQUEUE,
    "discard": batches_pb2.RESUME_MODE_DISCARD,
}

PULL_METHOD = "/rollout_buffer.v1.BatchService/PullBatch"


@dataclass(frozen=True, slots=True)
class Call(Generic[ReplyT, T]):
    """One unary RPC. `run_id` is empty where the request concerns no single run."""

    method: str
    run_id: str
    doing: str
    """For notices and errors, for example "publishing version 3"."""
    build: Callable[[common_pb2.RunRef], Message]
    """The request, given what was last seen of the run."""
    reply: type[ReplyT]
    decode: Callable[[ReplyT], T]


def serialize(message: Message) -> bytes:
    """A request as gRPC sends it."""
    return message.SerializeToString()


def note(revisions: Revisions, run_id: str, reply: Message) -> None:
    """Take the reply's revision into account. A run that was deleted, or that is new, has no past."""
    if isinstance(reply, runs_pb2.DeleteRunResponse):
        revisions.forget(run_id)
        return
    if isinstance(reply, runs_pb2.CreateRunResponse) and reply.created:
        revisions.forget(run_id)
    if isinstance(reply, runs_pb2.CreateRunResponse | runs_pb2.GetRunResponse):
        # A view acknowledges nothing: under wait_replicas it shows what no replica may have yet.
        return
    revisions.note(run_id, Revision.of(reply))  # type: ignore[arg-type]


def new_request_id() -> str:
    """Identity of a request, 32 characters."""
    return uuid.uuid4().hex


def create_run(run_id: str, policy: Policy | None) -> Call[runs_pb2.CreateRunResponse, RunState]:
    """CreateRun."""
    wire = (policy or Policy()).to_wire()
    return Call(
        "/rollout_buffer.v1.RunService/CreateRun",
        run_id,
        f"creating run {run_id!r}",
        lambda _: runs_pb2.CreateRunRequest(run_id=run_id, policy=wire),
        runs_pb2.CreateRunResponse,
        lambda reply: replies.run_state(reply.run, reply.revision),
    )


def get_run(run_id: str) -> Call[runs_pb2.GetRunResponse, RunState]:
    """GetRun."""
    return Call(
        "/rollout_buffer.v1.RunService/GetRun",
        run_id,
        f"reading run {run_id!r}",
        lambda ref: runs_pb2.GetRunRequest(run=ref),
        runs_pb2.GetRunResponse,
        lambda reply: replies.run_state(reply.run, reply.revision),
    )


def list_runs() -> Call[runs_pb2.ListRunsResponse, tuple[str, ...]]:
    """ListRuns."""
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
    """UpdatePolicy; replaces the named fields, or the whole policy where none is named. Raises InvalidField."""
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


_RunAlone: TypeAlias = Callable[[str], Call[ReplyT, None]]


def _run_alone(rpc: str, doing: str, request: Callable[..., Message], reply: type[ReplyT]) -> _RunAlone[ReplyT]:
    """A call of RunService that says which run it is about, and nothing else."""

    def call(run_id: str) -> Call[ReplyT, None]:
        return Call(
            f"/rollout_buffer.v1.RunService/{rpc}",
            run_id,
            f"{doing} run {run_id!r}",
            lambda ref: request(run=ref),
            reply,
            lambda _: None,
        )

    return call


pause_run = _run_alone("PauseRun", "pausing", runs_pb2.PauseRunRequest, runs_pb2.PauseRunResponse)
drain_run = _run_alone("DrainRun", "draining", runs_pb2.DrainRunRequest, runs_pb2.DrainRunResponse)
continue_run = _run_alone("ContinueRun", "continuing", runs_pb2.ContinueRunRequest, runs_pb2.ContinueRunResponse)
delete_run = _run_alone("DeleteRun", "deleting", runs_pb2.DeleteRunRequest, runs_pb2.DeleteRunResponse)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """Tasks and the cursor that moves with them, both or neither."""

    epoch: int
    expected_cursor: int
    """As the feeder last knew it."""
    cursor: int
    """After these tasks; at least expected_cursor."""
    tasks: Sequence[Task]
    """1 to 4,096."""
    feeder_state: bytes = b""
    """Opaque, belongs to the new cursor, at most 64 KiB."""
    request_id: str = ""
    """Identity of the submit, so that a repeat is recognised; empty: a new one."""


def submit_tasks(run_id: str, submission: Submission) -> Call[tasks_pb2.SubmitTasksResponse, Submitted]:
    """SubmitTasks."""
    request = tasks_pb2.SubmitTasksRequest(
        epoch=submission.epoch,
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
    )


def publish(
    run_id: str,
    *,
    epoch: int,
    version: int,
    manifest: "Manifest | None",
    commit_through: int | None,
    time_spent: TrainerTime | None,
) -> Call[weights_pb2.PublishResponse, Published]:
    """Publish."""
    wire = manifest.to_wire() if manifest is not None else None
    return Call(
        "/rollout_buffer.v1.WeightService/Publish",
        run_id,
        f"publishing version {version}",
        lambda ref: weights_pb2.PublishRequest(
            run=ref,
            epoch=epoch,
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
    run_id: str, *, epoch: int, plan: "CollectivePlan"
) -> Call[weights_pb2.PlanCollectiveResponse, None]:
    """PlanCollective."""
    wire = plan.to_wire()
    return Call(
        "/rollout_buffer.v1.WeightService/PlanCollective",
        run_id,
        f"announcing {plan.phase} of version {plan.version.version} to group {plan.membership}",
        lambda ref: weights_pb2.PlanCollectiveRequest(run=ref, epoch=epoch, plan=wire),
        weights_pb2.PlanCollectiveResponse,
        lambda _: None,
    )


def commit(run_id: str, *, epoch: int, through_step: int) -> Call[batches_pb2.CommitResponse, int]:
    """Commit; gives the steps committed so far."""
    return Call(
        "/rollout_buffer.v1.BatchService/Commit",
        run_id,
        f"committing through step {through_step}",
        lambda ref: batches_pb2.CommitRequest(run=ref, epoch=epoch, through_step=through_step),
        batches_pb2.CommitResponse,
        lambda reply: reply.committed_steps,
    )


def checkpoint(run_id: str, *, epoch: int, through_step: int) -> Call[batches_pb2.CheckpointResponse, int]:
    """Checkpoint; gives the steps freed so far."""
    return Call(
        "/rollout_buffer.v1.BatchService/Checkpoint",
        run_id,
        f"checkpointing through step {through_step}",
        lambda ref: batches_pb2.CheckpointRequest(run=ref, epoch=epoch, through_step=through_step),
        batches_pb2.CheckpointResponse,
        lambda reply: reply.checkpointed_steps,
    )


def resume(
    run_id: str, *, next_step: int | None, mode: ResumeMode, allow_regenerate: bool
) -> Call[batches_pb2.ResumeResponse, Resumed]:
    """Resume. Raises InvalidField for a mode that there is not."""
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
        replies.resumed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSpec:
    """Which shard of which round of which step."""

    epoch: int
    step: int
    """The next unassembled one, or any earlier one that is still retained."""
    rank: int = 0
    world_size: int = 1
    """Fixed for an epoch by its first pull."""
    train_version: int | None = None
    """The version whose weights will train on the batch; None: that of the step's earlier rounds, or the published."""
    round: int = 0
    """From 0: any closed one, or the next."""
    batch_groups: int | None = None
    """N of this step; None: the policy's. Whoever closes the first round decides."""

    def following(self) -> "PullSpec":
        """The step's next round."""
        return replace(self, round=self.round + 1, train_version=None, batch_groups=None)

    def __str__(self) -> str:
        return str(Place(self.step, self.round))

    def to_wire(self, ref: common_pb2.RunRef, wait_s: float) -> batches_pb2.PullBatchRequest:
        """The request of one attempt that waits up to `wait_s` at the service."""
        return batches_pb2.PullBatchRequest(
            run=ref,
            epoch=self.epoch,
            step=self.step,
            rank=self.rank,
            world_size=self.world_size,
            train_version=self.train_version,
            wait_ms=round(wait_s * 1000),
            round=self.round,
            batch_groups=self.batch_groups,
        )
