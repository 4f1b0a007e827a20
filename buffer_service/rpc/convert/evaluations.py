"""Evaluations. A task is kept as its serialized message, a result as its serialized Group."""

import hashlib

from buffer_service.domain import evaluations as ev
from buffer_service.domain import ops
from buffer_service.rpc.convert import fields, groups, tasks
from buffer_wire import limits
from buffer_wire.enums import numbers
from buffer_wire.errors import InvalidField
from buffer_wire.revision import Revision
from rollout_buffer.v1 import evaluations_pb2 as pb
from rollout_buffer.v1 import groups_pb2, tasks_pb2, weights_pb2

_OUTCOMES = numbers(pb.EvaluationOutcome, ev.EvaluationOutcome)
_RETURNED = numbers(tasks_pb2.ReturnKind, (ev.FinishKind.INTERRUPTED, ev.FinishKind.FAILED))
_KINDS = {number: kind for kind, number in _RETURNED.items()}

# ── the trainer's side ───────────────────────────────────────────────────────


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
    return ev.SubmitEvaluation(fields.epoch(request.epoch), name, version, digest.digest(), new)


def to_submitted(result: ev.EvaluationSubmitted) -> pb.SubmitEvaluationResponse:
    """The reply of a submit."""
    return pb.SubmitEvaluationResponse(
        revision=result.revision,
        revision_proof=result.revision.proof,
        evaluation=to_evaluation(result.evaluation),
        created=result.created,
    )


def to_evaluation(view: ev.EvaluationView) -> pb.Evaluation:
    """The message of an evaluation."""
    return pb.Evaluation(
        eval_id=view.eval_id,
        version=fields.to_version(view.version),
        tasks=view.tasks,
        pending=view.pending,
        leased=view.leased,
        finished=view.finished,
        failed=view.failed,
        stored_bytes=view.stored_bytes,
        created_ms=view.created_ms,
        failures=[
            pb.EvaluationFailure(task_index=f.task_index, task_id=f.task_id, attempts=f.attempts, error=f.error)
            for f in view.failures
        ],
    )


def to_result(result: ev.EvaluationResult, body: ops.Buffer | None) -> pb.EvaluationResult:
    """The message of a task that has ended; `body` None: there is no group (any more)."""
    error = result.error
    if result.payload_key and body is None:
        error = "the result is gone from the store"
    return pb.EvaluationResult(
        group=groups_pb2.Group.FromString(bytes(body)) if body is not None else None,
        task_index=result.task_index,
        task_id=result.task_id,
        attempts=result.attempts,
        error=error,
    )


# ── the workers' side ────────────────────────────────────────────────────────


def ask(request: pb.LeaseEvaluationRequest) -> ev.EvaluationAsk:
    """A checked lease request; its wait is checked too."""
    fields.number(request.wait_ms, "wait_ms", 0, 60_000)
    worker_id, instance_id = _worker(request)
    return ev.EvaluationAsk(
        worker_id=worker_id,
        instance_id=instance_id,
        request_id=fields.line(request.request_id, "request_id", 1, 64),
        engine_id=fields.name(request.engine_id, "engine_id"),
        loaded=fields.version(request.loaded, "loaded"),
        max_tasks=fields.number(request.max_tasks, "max_tasks", 0, limits.MAX_LEASES_PER_REQUEST),
        would_load=request.would_load,
    )


def _worker(
    request: pb.LeaseEvaluationRequest | pb.ExtendEvaluationRequest | pb.FinishEvaluationRequest,
) -> tuple[str, str]:
    return fields.name(request.worker_id, "worker_id"), fields.line(request.instance_id, "instance_id", 1, 64)


def to_leased(result: ev.EvaluationLeased) -> pb.LeaseEvaluationResponse:
    """The reply of a lease request."""
    return pb.LeaseEvaluationResponse(
        revision=result.revision,
        revision_proof=result.revision.proof,
        leases=[_to_lease(grant, result.ttl_ms) for grant in result.grants],
        wait=tasks.LEASE_WAITS[result.wait],
        wanted=_to_wanted(result.wanted) if result.wanted is not None else None,
    )


def _to_lease(grant: ev.EvaluationGrant, ttl_ms: int) -> pb.EvaluationLease:
    return pb.EvaluationLease(
        lease_id=grant.lease_id,
        task=tasks_pb2.Task.FromString(grant.spec),
        version=fields.to_version(grant.version),
        attempt=grant.attempt,
        ttl_ms=ttl_ms,
    )


def _to_wanted(wanted: ev.Wanted) -> pb.WantedWeights:
    return pb.WantedWeights(
        version=fields.to_version(wanted.version),
        manifest=weights_pb2.WeightManifest.FromString(wanted.manifest) if wanted.manifest else None,
    )


def extend(request: pb.ExtendEvaluationRequest) -> tuple[str, str, list[str]]:
    """(worker_id, instance_id, lease_ids) of a checked heartbeat."""
    fields.count(request.lease_ids, "lease_ids", 1, 4_096)
    return (*_worker(request), [fields.lease_id(value, f"lease_ids[{i}]") for i, value in enumerate(request.lease_ids)])


def to_extended(result: ops.Extended) -> pb.ExtendEvaluationResponse:
    """The reply of a heartbeat."""
    return pb.ExtendEvaluationResponse(
        revision=result.revision,
        revision_proof=result.revision.proof,
        states=[tasks.LEASE_STATES[state] for state in result.states],
        ttl_ms=result.ttl_ms,
    )


def finish(request: pb.FinishEvaluationRequest, max_payload_bytes: int) -> ev.FinishEvaluation:
    """A checked end of a lease."""
    worker_id, instance_id = _worker(request)
    lease_id = fields.lease_id(request.lease_id)
    if request.WhichOneof("end") == "group":
        body = request.group.SerializeToString()
        facts = groups.new_group(memoryview(body), max_payload_bytes).facts
        return ev.FinishEvaluation(
            worker_id,
            instance_id,
            lease_id,
            ev.FinishKind.GROUP,
            body=body,
            task_id=facts.task_id,
            samples=facts.samples,
            head=facts.head,
            tail=facts.tail,
        )
    back = request.handed_back
    if back.kind not in _KINDS:
        raise InvalidField("end", "neither a group nor handed back", "a group, or handed_back with a kind")
    error = fields.text(back.error, "handed_back.error", 0, limits.MAX_ERROR_CHARS)
    return ev.FinishEvaluation(worker_id, instance_id, lease_id, _KINDS[back.kind], error=error)


def to_finished(revision: Revision, outcome: ev.EvaluationOutcome) -> pb.FinishEvaluationResponse:
    """The reply to the end of a lease."""
    return pb.FinishEvaluationResponse(revision=revision, revision_proof=revision.proof, outcome=_OUTCOMES[outcome])
