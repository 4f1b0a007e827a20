"""Pulls, rejections, commits, checkpoints and resumes."""

from buffer_service.domain import ops
from buffer_service.rpc.convert import fields
from buffer_wire import limits
from buffer_wire.enums import members
from buffer_wire.errors import InvalidField
from buffer_wire.messages import message_of
from rollout_buffer.v1 import batches_pb2 as pb

_MODES = {pb.RESUME_MODE_UNSPECIFIED: ops.ResumeMode.REPLAY, **members(pb.ResumeMode, ops.ResumeMode)}


def pull(request: pb.PullBatchRequest) -> ops.Pull:
    """A checked pull; its wait is checked too."""
    fields.number(request.wait_ms, "wait_ms", 0, 3_600_000)
    world_size = fields.number(request.world_size, "world_size", 1, 4_096)
    fields.number(request.train_version, "train_version", 0, limits.MAX_VERSION)
    return ops.Pull(
        term=fields.term(request.term),
        step=request.step,
        rank=fields.number(request.rank, "rank", 0, world_size - 1),
        world_size=world_size,
        train_version=request.train_version if request.HasField("train_version") else None,
        micro_batch=request.micro_batch,
        batch_groups=request.batch_groups if request.HasField("batch_groups") else None,
    )


def to_batch_info(
    batch: ops.Batch, waited_ms: int, committed_steps: int = 0, checkpointed_steps: int = 0
) -> pb.BatchInfo:
    """The facts of a step, up to this micro-batch, that open a pull stream."""
    return message_of(
        pb.BatchInfo,
        batch,
        shard_groups=len(batch.shard),
        staleness_mean_milli=_mean_milli(batch),
        waited_ms=waited_ms,
        queued_groups=batch.queued,
        committed_steps=committed_steps,
        checkpointed_steps=checkpointed_steps,
    )


def reject(request: pb.RejectRequest) -> ops.Reject:
    """A checked rejection."""
    fields.count(request.group_ids, "group_ids", 0, ops.MAX_REJECTED)
    for index, group_id in enumerate(request.group_ids):
        fields.line(group_id, f"group_ids[{index}]", 1, 160)
    return ops.Reject(
        term=fields.term(request.term),
        step=request.step,
        group_ids=list(request.group_ids),
        reason=fields.line(request.reason, "reason", 0, 200),
    )


def to_rejected(rejected: ops.Rejected) -> pb.RejectResponse:
    """The reply of a rejection."""
    info = message_of(
        pb.BatchInfo,
        rejected,
        **dict.fromkeys(("shard_groups", "shard_tokens", "waited_ms", "queued_groups"), 0),
        committed_steps=0,
        checkpointed_steps=0,
        staleness_mean_milli=_mean_milli(rejected),
        replayed=False,
    )
    return fields.reply(pb.RejectResponse, rejected, batch=info)


def _mean_milli(batch: ops.Batch | ops.Rejected) -> int:
    return batch.staleness_sum * 1000 // batch.total_groups if batch.total_groups else 0


def resume(request: pb.ResumeRequest) -> ops.Resume:
    """A checked resume."""
    if request.mode not in _MODES:
        raise InvalidField("mode", request.mode, "one of ResumeMode")
    return ops.Resume(
        next_step=request.next_step if request.HasField("next_step") else None,
        mode=_MODES[request.mode],
        request_id=fields.line(request.request_id, "request_id", 1, 64),
        allow_regenerate=request.allow_regenerate,
    )
