"""Policies and the state of a run. A policy's bounds are the domain's; here only what the wire adds is checked."""

from buffer_service.domain import ops
from buffer_service.domain.policy import UNSET, OverflowAction, RunPolicy, StaleAction
from buffer_service.domain.transitions import GroupState, TaskState
from buffer_service.observability.ledgers import groups_balanced, tasks_balanced
from buffer_service.rpc.convert.fields import to_version
from buffer_service.rpc.convert.weights import to_report
from buffer_wire.errors import InvalidField
from rollout_buffer.v1 import runs_pb2 as pb

_OVERFLOW = {
    pb.OVERFLOW_ACTION_UNSPECIFIED: OverflowAction.DROP_OLDEST,
    pb.OVERFLOW_ACTION_DROP_OLDEST: OverflowAction.DROP_OLDEST,
    pb.OVERFLOW_ACTION_BLOCK: OverflowAction.BLOCK,
    pb.OVERFLOW_ACTION_REJECT: OverflowAction.REJECT,
}
_STALE = {
    pb.STALE_ACTION_UNSPECIFIED: StaleAction.DROP,
    pb.STALE_ACTION_DROP: StaleAction.DROP,
    pb.STALE_ACTION_RECYCLE: StaleAction.RECYCLE,
}
_TO_OVERFLOW = {action: wire for wire, action in _OVERFLOW.items() if wire}
_TO_STALE = {action: wire for wire, action in _STALE.items() if wire}

_OPTIONAL = tuple(f.name for f in pb.RunPolicy.DESCRIPTOR.fields if f.has_presence)
_MAY_BE_UNSET = frozenset({"max_staleness", "max_lookahead", "failure_budget"})


def policy(message: pb.RunPolicy) -> RunPolicy:
    """The effective policy: unset fields take their defaults. Raises InvalidField, InvalidPolicy."""
    values = {field: getattr(message, field) for field in _OPTIONAL if message.HasField(field)}  # type: ignore[arg-type]
    if values.get("max_queued_groups") == 0:
        raise InvalidField("policy.max_queued_groups", 0, "at least batch_groups; unset for the default")
    if message.overflow_action not in _OVERFLOW:
        raise InvalidField("policy.overflow_action", message.overflow_action, "one of OverflowAction")
    if message.stale_action not in _STALE:
        raise InvalidField("policy.stale_action", message.stale_action, "one of StaleAction")
    return RunPolicy(
        overflow_action=_OVERFLOW[message.overflow_action], stale_action=_STALE[message.stale_action], **values
    )


def to_policy(effective: RunPolicy) -> pb.RunPolicy:
    """The message of an effective policy: every field filled in but those that are unset on purpose."""
    values = {
        field: getattr(effective, field)
        for field in _OPTIONAL
        if not (field in _MAY_BE_UNSET and getattr(effective, field) == UNSET)
    }
    return pb.RunPolicy(
        overflow_action=_TO_OVERFLOW[effective.overflow_action],
        stale_action=_TO_STALE[effective.stale_action],
        **values,
    )


def to_run(view: ops.RunView) -> pb.Run:
    """The message of a run's whole state."""
    return pb.Run(
        run_id=view.run_id,
        policy=to_policy(view.policy),
        created_ms=view.created_ms,
        epoch=view.epoch,
        published=to_version(view.published),
        next_step=view.next_step,
        committed_steps=view.committed_steps,
        checkpointed_steps=view.checkpointed_steps,
        world_size=view.world_size,
        cursor=view.cursor,
        paused=view.paused,
        groups=_to_group_ledger(view),
        tasks=_to_task_ledger(view),
        statistics=pb.RunStatistics(**view.statistics),
        engines=[to_report(report) for report in view.engines],
        failures=[
            pb.TaskFailure(task_id=f.task_id, attempts=f.attempts, error=f.error, time_ms=f.time_ms)
            for f in view.failures
        ],
    )


def _to_group_ledger(view: ops.RunView) -> pb.GroupLedger:
    entries = {state: _to_amount(view.groups.get(state, ops.Amount())) for state in ("accepted", *GroupState)}
    return pb.GroupLedger(**entries, balanced=groups_balanced(view))


def _to_task_ledger(view: ops.RunView) -> pb.TaskLedger:
    entries = {state: view.tasks.get(state, 0) for state in ("submitted", *TaskState)}
    return pb.TaskLedger(**entries, balanced=tasks_balanced(view))


def _to_amount(amount: ops.Amount) -> pb.Amount:
    return pb.Amount(groups=amount.groups, samples=amount.samples, tokens=amount.tokens, bytes=amount.bytes)
