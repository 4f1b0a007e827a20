"""Tasks and leases. A task is kept as its serialized message, with the id it was given."""

from collections.abc import Sequence
from math import isfinite

from buffer_service.domain import ops
from buffer_service.rpc.convert import fields
from buffer_service.rpc.convert.groups import partial_rollout_facts
from buffer_service.rpc.convert.weights import report
from buffer_wire import engine_columns, limits
from buffer_wire.codec import split_group
from buffer_wire.enums import members
from buffer_wire.errors import InvalidField
from buffer_wire.images.references import check_images, check_placeholders, check_reference
from buffer_wire.messages import message_of
from buffer_wire.payloads.keys import group_checksum, payload_checksum
from rollout_buffer.v1 import tasks_pb2 as pb

DAY_MS = 86_400_000
_ROLES = frozenset({"system", "user", "assistant", "tool"})
_KINDS = members(pb.ReturnKind, ops.ReturnKind)
_SINKS = members(pb.TaskSink, ops.TaskSink)

# ── submit ───────────────────────────────────────────────────────────────────


def submit(request: pb.SubmitTasksRequest) -> ops.Submit:
    """A checked submit."""
    if request.cursor < request.expected_cursor:
        raise InvalidField("cursor", request.cursor, f"at least expected_cursor, {request.expected_cursor}")
    fields.count(request.tasks, "tasks", 0, limits.MAX_TASKS_PER_SUBMIT)
    return ops.Submit(
        term=fields.term(request.term),
        request_id=fields.line(request.request_id, "request_id", 1, 64),
        expected_cursor=request.expected_cursor,
        cursor=request.cursor,
        feeder_state=fields.size(request.feeder_state, "feeder_state", limits.MAX_FEEDER_STATE_BYTES),
        tasks=[new_task(f"tasks[{i}]", task) for i, task in enumerate(request.tasks)],
    )


def new_task(at: str, task: pb.Task) -> ops.NewTask:
    """A checked task; `at` names it in errors."""
    if task.task_id and not limits.TASK_ID.fullmatch(task.task_id):
        raise InvalidField(f"{at}.task_id", task.task_id, "empty, or 1 to 128 characters of [A-Za-z0-9._:-]")
    _check_prompt(at, task)
    _check_sampling(f"{at}.sampling", task.sampling)
    _check_columns(at, task.columns)
    for name, most in (("generate_timeout_ms", DAY_MS), ("reward_timeout_ms", DAY_MS), ("sample_attempts", 100)):
        fields.number(getattr(task, name), f"{at}.{name}", 0, most)
    metadata = task.metadata_json.encode()
    if len(metadata) > limits.MAX_METADATA_BYTES:
        raise InvalidField(
            f"{at}.metadata_json", f"{len(task.metadata_json)} characters", f"at most {limits.MAX_METADATA_BYTES} bytes"
        )
    return ops.NewTask(
        task_id=task.task_id,
        group_size=fields.number(task.group_size, f"{at}.group_size", 1, limits.MAX_SAMPLES),
        priority=fields.number(task.priority, f"{at}.priority", 0, 255),
        environment=fields.line(task.environment, f"{at}.environment", 0, 64),
        spec=task.SerializeToString(),
        expected_tokens=fields.number(task.expected_tokens, f"{at}.expected_tokens", 0, 1 << 31),
        metadata=metadata if len(metadata) <= limits.MAX_RECORDED_METADATA_BYTES else b"",
    )


def _check_prompt(at: str, task: pb.Task) -> None:
    if bool(task.prompt_token_ids) == bool(task.messages):
        which = "both" if task.messages else "neither"
        raise InvalidField(f"{at}.prompt_token_ids", f"{which} set", "set, or messages, exactly one of the two")
    if len(task.prompt_token_ids) > limits.MAX_PROMPT_TOKENS:
        raise InvalidField(
            f"{at}.prompt_token_ids", f"{len(task.prompt_token_ids)} tokens", f"at most {limits.MAX_PROMPT_TOKENS}"
        )
    if task.prompt_token_ids and min(task.prompt_token_ids) < 0:
        raise InvalidField(f"{at}.prompt_token_ids", min(task.prompt_token_ids), "token ids of at least 0")
    for j, message in enumerate(task.messages):
        if message.role not in _ROLES:
            raise InvalidField(f"{at}.messages[{j}].role", message.role, "system, user, assistant or tool")
        _check_parts(f"{at}.messages[{j}]", message)
    if task.images and task.messages:
        raise InvalidField(f"{at}.images", f"{len(task.images)} images", "none beside messages: parts hold theirs")
    check_images(f"{at}.images", task.images, len(task.prompt_token_ids))
    check_placeholders(f"{at}.images", task.images, task.prompt_token_ids)
    images = [part for message in task.messages for part in message.parts if part.HasField("image")]
    if len(images) > limits.MAX_IMAGES:
        raise InvalidField(f"{at}.messages", f"{len(images)} images", f"at most {limits.MAX_IMAGES}")


def _check_parts(at: str, message: pb.ChatMessage) -> None:
    if message.parts and message.content:
        raise InvalidField(f"{at}.parts", f"{len(message.parts)} parts", "none beside content")
    fields.count(message.parts, f"{at}.parts", 0, limits.MAX_PARTS_OF_MESSAGE)
    for i, part in enumerate(message.parts):
        if part.HasField("image"):
            check_reference(f"{at}.parts[{i}].image", part.image)
            if part.image.start or part.image.tokens:
                raise InvalidField(f"{at}.parts[{i}].image.start", part.image.start, "unset, as tokens is")
        elif not part.HasField("text"):
            raise InvalidField(f"{at}.parts[{i}]", "empty", "text or an image")


def _check_sampling(at: str, sampling: pb.SamplingParams) -> None:
    fields.number(sampling.max_new_tokens, f"{at}.max_new_tokens", 1, limits.MAX_NEW_TOKENS)
    if sampling.HasField("temperature") and not (isfinite(sampling.temperature) and sampling.temperature > 0):
        raise InvalidField(f"{at}.temperature", sampling.temperature, "finite and above 0")
    if sampling.HasField("top_p") and not 0 < sampling.top_p <= 1:
        raise InvalidField(f"{at}.top_p", sampling.top_p, "above 0 and at most 1")
    if sampling.HasField("top_k"):
        fields.number(sampling.top_k, f"{at}.top_k", 1, (1 << 32) - 1)
    fields.count(sampling.stop, f"{at}.stop", 0, 16)
    fields.count(sampling.stop_token_ids, f"{at}.stop_token_ids", 0, 64)
    fields.number(sampling.seed, f"{at}.seed", 0, limits.MAX_SEED)
    if not 0 <= sampling.min_p <= 1:
        raise InvalidField(f"{at}.min_p", sampling.min_p, "0 to 1")
    if sampling.HasField("repetition_penalty") and not 0 < sampling.repetition_penalty <= 2:
        raise InvalidField(f"{at}.repetition_penalty", sampling.repetition_penalty, "above 0 and at most 2")
    fields.number(sampling.min_new_tokens, f"{at}.min_new_tokens", 0, sampling.max_new_tokens)


def _check_columns(at: str, names: Sequence[str]) -> None:
    for name in names:
        if not engine_columns.names_of(name):
            raise InvalidField(f"{at}.columns", name, engine_columns.KNOWN)
    fields.unique(names, f"{at}.columns")
    if len(tops := [name for name in names if engine_columns.top_of(name)]) > 1:
        raise InvalidField(f"{at}.columns", ", ".join(tops), "one of top_logprobs_K")


# ── leases ───────────────────────────────────────────────────────────────────


def lease_ask(request: pb.LeaseTasksRequest, message_bytes: int) -> ops.LeaseAsk:
    """A checked lease request; its wait is checked too. `message_bytes`: what a reply can carry."""
    fields.number(request.wait_ms, "wait_ms", 0, 60_000)
    worker_id, instance_id = _worker(request)
    sink = _sink(request.sink)
    least = 0 if sink is ops.TaskSink.EVALUATIONS else 1
    return ops.LeaseAsk(
        worker_id=worker_id,
        instance_id=instance_id,
        request_id=fields.line(request.request_id, "request_id", 1, 64),
        engine_id=fields.name(request.engine_id, "engine_id"),
        loaded=fields.version(request.loaded, "loaded"),
        max_tasks=fields.number(request.max_tasks, "max_tasks", least, limits.MAX_LEASES_PER_REQUEST),
        message_bytes=message_bytes,
        sink=sink,
        would_load=request.would_load,
    )


def _sink(value: "pb.TaskSink.ValueType") -> ops.TaskSink:
    if value == pb.TASK_SINK_UNSPECIFIED:
        return ops.TaskSink.QUEUE
    if value not in _SINKS:
        raise InvalidField("sink", value, "TASK_SINK_QUEUE or TASK_SINK_EVALUATIONS")
    return _SINKS[value]


def _worker(request: pb.LeaseTasksRequest | pb.ExtendLeasesRequest | pb.ReturnLeasesRequest) -> tuple[str, str]:
    return fields.name(request.worker_id, "worker_id"), fields.line(request.instance_id, "instance_id", 1, 64)


def to_leased(result: ops.Leased) -> pb.LeaseTasksResponse:
    """The reply of a lease request."""
    leases = [_to_lease(grant, result.ttl_ms) for grant in result.grants]
    return fields.reply(pb.LeaseTasksResponse, result, leases=leases)


def _to_lease(grant: ops.LeaseGrant, ttl_ms: int) -> pb.Lease:
    task = pb.Task.FromString(grant.spec)
    task.task_id = grant.task_id
    return message_of(pb.Lease, grant, task=task, ttl_ms=ttl_ms)


def extend(request: pb.ExtendLeasesRequest) -> tuple[str, str, list[str]]:
    """Check a heartbeat and return its (worker_id, instance_id, lease_ids). Raises InvalidField."""
    fields.count(request.lease_ids, "lease_ids", 1, 4_096)
    return (*_worker(request), [fields.lease_id(value, f"lease_ids[{i}]") for i, value in enumerate(request.lease_ids)])


def heartbeat(
    request: pb.HeartbeatRequest,
) -> tuple[list[tuple[str, str, list[str]]], list[ops.EngineReport]]:
    """Extensions and reports of a checked heartbeat, in order. Raises InvalidField."""
    if not request.extensions and not request.reports:
        raise InvalidField("extensions", "empty", "set, or reports")
    fields.count(request.extensions, "extensions", 0, limits.MAX_PARTS_OF_HEARTBEAT)
    fields.count(request.reports, "reports", 0, limits.MAX_PARTS_OF_HEARTBEAT)
    extensions = [fields.within(f"extensions[{i}]", extend, each) for i, each in enumerate(request.extensions)]
    return extensions, [fields.within(f"reports[{i}]", report, each) for i, each in enumerate(request.reports)]


def give_back(request: pb.ReturnLeasesRequest) -> tuple[str, str, list[ops.LeaseReturn]]:
    """(worker_id, instance_id, returns) of a checked return."""
    fields.count(request.returns, "returns", 1, limits.MAX_LEASES_PER_REQUEST)
    fields.unique((ret.lease_id for ret in request.returns), "returns")
    returns = [_lease_return(f"returns[{i}]", ret) for i, ret in enumerate(request.returns)]
    return (*_worker(request), returns)


def _lease_return(at: str, message: pb.LeaseReturn) -> ops.LeaseReturn:
    if message.kind not in _KINDS:
        raise InvalidField(f"{at}.kind", message.kind, "RETURN_KIND_INTERRUPTED or RETURN_KIND_FAILED")
    partial_rollout, head, tokens, checksum = b"", None, 0, 0
    # A pinned task is made anew from nothing, so what was made of it is not even looked at.
    if message.HasField("partial_rollout") and ops.sink_of(message.lease_id) is ops.TaskSink.QUEUE:
        head, tokens = partial_rollout_facts(f"{at}.partial_rollout", message.partial_rollout, message.lease_id)
        # One that holds no token would replace what an earlier attempt left.
        if tokens:
            partial_rollout = message.partial_rollout.SerializeToString()
            header, payload = split_group(memoryview(partial_rollout))
            checksum = group_checksum(header, payload_checksum(payload))
    return ops.LeaseReturn(
        lease_id=fields.lease_id(message.lease_id, f"{at}.lease_id"),
        kind=_KINDS[message.kind],
        error=fields.text(message.error, f"{at}.error", 0, limits.MAX_ERROR_CHARS),
        partial_rollout=partial_rollout,
        head=head,
        tokens=tokens,
        checksum=checksum,
    )
