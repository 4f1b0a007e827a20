"""Evaluations. A task is kept as its serialized message, a result as its serialized Group."""

import hashlib

from buffer_service.domain import evaluations as ev
from buffer_service.domain import ops
from buffer_service.rpc.convert import fields, tasks
from buffer_wire import limits
from buffer_wire.messages import message_of
from rollout_buffer.v1 import evaluations_pb2 as pb
from rollout_buffer.v1 import groups_pb2


def eval_id(value: str) -> str:
    """An evaluation's id."""
    return fields.run_id(value, "eval_id")


def submit(request: pb.SubmitEvaluationRequest) -> ev.SubmitEvaluation:
    """A checked submit; tasks without an id get one, and a digest of it all tells repeats from conflicts."""
    name = eval_id(request.eval_id)
    fields.count(request.tasks, "tasks", 1, limits.MAX_TASKS_PER_SUBMIT)
    version = None
    if request.HasField("version"):
        version = fields.number(request.version, "version", 0, limits.MAX_VERSION)
    digest = hashlib.sha256(repr(version).encode())
    new = []
    for i, task in enumerate(request.tasks):
        task.task_id = task.task_id or f"{name}.{i}"
        checked = tasks.new_task(f"tasks[{i}]", task)
        spec = task.SerializeToString(deterministic=True)
        digest.update(len(spec).to_bytes(8) + spec)
        new.append(ev.EvaluationTask(checked.task_id, checked.group_size, spec))
    fields.unique((task.task_id for task in new), "tasks")
    return ev.SubmitEvaluation(fields.term(request.term), name, version, digest.digest(), new)


def to_result(result: ev.EvaluationResult, body: ops.Buffer | None) -> pb.EvaluationResult:
    """The message of a task that has ended; `body` None: there is no group (any more)."""
    error = result.error
    if result.payload_key and body is None:
        error = "the result is gone from the store"
    group = groups_pb2.Group.FromString(bytes(body)) if body is not None else None
    return message_of(pb.EvaluationResult, result, group=group, error=error)
