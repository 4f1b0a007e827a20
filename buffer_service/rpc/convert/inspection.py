"""Lists and waits to the wire, and the requests for them."""

from dataclasses import replace

from buffer_service.domain import inspection as ins
from buffer_service.domain.admission import required_version
from buffer_service.domain.gate import oldest_useful_version
from buffer_service.domain.policy import UNSET, RunPolicy, StaleAction
from buffer_service.domain.timeline import next_train_version
from buffer_service.rpc.convert import fields
from buffer_wire import limits
from buffer_wire.codec import MalformedMessage, read_varint
from buffer_wire.codec import fields as wire_fields
from buffer_wire.enums import members, numbers
from buffer_wire.errors import InvalidField
from buffer_wire.messages import message_of
from buffer_wire.payloads.keys import size_of
from rollout_buffer.v1 import inspect_pb2 as pb

MAX_PAGE, USUAL_PAGE = 256, 100
MAX_NAMED, USUAL_NAMED = 100, 20
MAX_TOKENS, USUAL_TOKENS = 65_536, 1_024

_SETS = members(pb.TaskSet, ins.TaskSet)
_PLACES = {ins.Place.UNKNOWN: pb.GROUP_PLACE_UNSPECIFIED}
_PLACES |= numbers(pb.GroupPlace, [place for place in ins.Place if place])
_TASK_ID, _LEASE_ID, _ENVIRONMENT, _WORKER_ID = 1, 3, 4, 8
"""Numbers of fields of GroupHeader."""
_RULES = {
    "max_inflight_groups": {"reserve_queue_space": False, "max_lookahead": UNSET},
    "reserve_queue_space": {"max_inflight_groups": 0, "max_lookahead": UNSET},
    "max_lookahead": {"max_inflight_groups": 0, "reserve_queue_space": False},
}
"""The rules of admission, each with the values of policy fields that leave the others out."""
_WAITS_FOR_NOBODY = {"stale_action": StaleAction.DROP, "order_window_groups": 0}
"""Values of the fields that need a rule which is left out."""


# ── requests ─────────────────────────────────────────────────────────────────


def page_size(value: int) -> int:
    """Number of things that a page looks at. Raises InvalidField."""
    return fields.number(value, "page_size", 1, MAX_PAGE) if value else USUAL_PAGE


def named(value: int) -> int:
    """Number of pushes, leases and workers to name. Raises InvalidField."""
    return fields.number(value, "limit", 1, MAX_NAMED) if value else USUAL_NAMED


def task_set(request: pb.ListTasksRequest) -> ins.TaskSet:
    """Set of tasks to list. Raises InvalidField."""
    if request.set not in _SETS:
        raise InvalidField("set", request.set, "TASK_SET_PENDING, TASK_SET_LEASED or TASK_SET_ENDED")
    if request.worker_id and request.set != pb.TASK_SET_LEASED:
        raise InvalidField("worker_id", request.worker_id, "empty but for TASK_SET_LEASED")
    return _SETS[request.set]


def worker_id(value: str) -> str:
    """Id of the worker to keep to, "" for any. Raises InvalidField."""
    return fields.name(value, "worker_id") if value else ""


def environment(request: pb.ListTasksRequest | pb.ListGroupsRequest) -> str | None:
    """The environment to keep to, None for all."""
    return fields.line(request.environment, "environment", 0, 64) if request.HasField("environment") else None


def task_id(value: str) -> str:
    """A task's id."""
    if not limits.TASK_ID.fullmatch(value):
        raise InvalidField("task_id", value, "1 to 128 characters of [A-Za-z0-9._:-]")
    return value


def step_of(request: pb.ListGroupsRequest) -> int | None:
    """The step, None for the queue."""
    return fields.number(request.step, "step", 0, limits.MAX_VERSION) if request.HasField("step") else None


def max_tokens(value: int) -> int:
    """Number of token ids to send. Raises InvalidField."""
    return fields.number(value, "max_tokens", 1, MAX_TOKENS) if value else USUAL_TOKENS


# ── replies ──────────────────────────────────────────────────────────────────


def to_task(task: ins.TaskFacts) -> pb.TaskInfo:
    """The message of a task."""
    return message_of(
        pb.TaskInfo,
        task,
        partial_rollout_bytes=size_of(task.payload_key) if task.payload_key else 0,
        group_id=f"{task.task_id}/{task.incarnation}" if task.accepted_attempt >= 0 else "",
        place=_PLACES[task.place],
        not_before_ms=_if_any(task.not_before_ms),
        partial_rollout_head=_if_any(task.partial_rollout_head),
        lease=_to_lease(task) if task.expires_ms >= 0 else None,
    )


def _to_lease(task: ins.TaskFacts) -> pb.LeaseInfo:
    return pb.LeaseInfo(
        lease_id=f"{task.task_id}/{task.incarnation}/{task.attempt}",
        worker_id=task.worker_id,
        instance_id=task.instance_id,
        expires_ms=task.expires_ms,
        heard_ms=max(0, task.expires_ms - task.lease_ttl_ms),
        version=task.lease_version,
    )


def to_group(group: ins.GroupView, place: ins.Place) -> pb.GroupInfo:
    """The message of a group."""
    return message_of(
        pb.GroupInfo,
        group,
        place=_PLACES[place],
        bytes=group.size_bytes,
        head_version=group.head,
        tail_version=group.tail,
        mean_version_milli=group.mean_milli,
        micro_batch=_if_any(group.micro_batch),
        rank=_if_any(group.rank),
    )


def _if_any(value: int) -> int | None:
    """The value, None for -1, which stands for nothing."""
    return value if value >= 0 else None


def to_step(step: ins.StepView) -> pb.StepInfo:
    """The message of a step."""
    return message_of(
        pb.StepInfo,
        step,
        place=_PLACES[step.place],
        world_size=step.ranks,
        bytes=step.size_bytes,
        staleness_mean_milli=1000 * step.staleness_sum // max(1, step.groups),
    )


def to_waits(waits: ins.Waits) -> pb.GetWaitsResponse:
    """Message of the waits of a run: who waits on whom."""
    return message_of(
        pb.GetWaitsResponse,
        waits,
        blocked_groups=waits.blocked,
        pushes=[_to_push(push) for push in waits.pushes],
        leases=waits.leased,
        expiring=[to_task(task) for task in waits.expiring],
        admission=_to_admission(waits.policy, waits.clock, waits.leased),
    )


def _to_push(push: ins.BlockedPush) -> pb.BlockedPush:
    names = _names(push.head)
    return message_of(
        pb.BlockedPush,
        push,
        bytes=push.size_bytes,
        task_id=names.get(_TASK_ID, ""),
        lease_id=names.get(_LEASE_ID, ""),
        environment=names.get(_ENVIRONMENT, ""),
        worker_id=names.get(_WORKER_ID, ""),
    )


def _names(head: bytes) -> dict[int, str]:
    """Strings of the header that a serialized Group begins with; none where it is not whole."""
    try:
        tag, at = read_varint(head, 0)
        size, at = read_varint(head, at)
        if tag != 1 << 3 | 2 or at + size > len(head):
            return {}
        return {
            number: bytes(value).decode("utf-8", "replace")
            for number, value in wire_fields(memoryview(head)[at : at + size])
            if isinstance(value, memoryview) and number in (_TASK_ID, _LEASE_ID, _ENVIRONMENT, _WORKER_ID)
        }
    except MalformedMessage:
        return {}


def _to_admission(policy: RunPolicy, clock: ins.AdmissionClock, leased: int) -> pb.Admission:
    unpublished = clock.unpublished_steps
    train_version = next_train_version(clock.published_version, unpublished, policy.batches_per_publish)
    rooms = {
        rule: clock.room(replace(policy, **_WAITS_FOR_NOBODY, **without), leased)  # type: ignore[arg-type]
        for rule, without in _RULES.items()
    }
    required = required_version(
        policy,
        published=clock.published_version,
        unpublished_steps=unpublished,
        open_step=clock.open_step,
        queued=clock.queued,
        leased=leased,
        missing=clock.missing,
    )
    return pb.Admission(
        rooms=[pb.AdmissionRoom(rule=rule, groups=room) for rule, room in rooms.items() if room is not None],
        next_train_version=train_version,
        required_version=max(required, oldest_useful_version(policy, train_version)),
        due_tasks=clock.due_tasks,
        backing_off_tasks=clock.backing_off_tasks,
    )
