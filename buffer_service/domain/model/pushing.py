"""Push: what becomes of a finished group.

Invariants: at most one group is accepted for a task's generation, whichever attempt made it, and accepting it ends the
live lease; the queue never exceeds its caps by a push; the groups of a call after a blocked one overtake nothing.
"""

from collections.abc import Iterable

from buffer_service.domain.identity import LeaseId, group_id
from buffer_service.domain.model.leasing import prolong
from buffer_service.domain.model.records import Task
from buffer_service.domain.model.state import RunState
from buffer_service.domain.ops import GroupFacts, Pushed, PushKind, PushResult
from buffer_service.domain.policy import OverflowAction
from buffer_service.domain.transitions import TaskState


def push(run: RunState, groups: Iterable[tuple[GroupFacts, str]]) -> PushResult:
    """Judge groups, whose payloads are stored under the given keys, one after another."""
    run.require_store()
    outcomes: list[Pushed] = []
    line_is_blocked = False
    for facts, payload_key in groups:
        outcome = _refuse(run, facts) or _place(run, facts, payload_key, line_is_blocked=line_is_blocked)
        line_is_blocked = line_is_blocked or outcome.kind is PushKind.BLOCKED
        if outcome.kind not in {PushKind.QUEUED, PushKind.BLOCKED}:
            run.payloads.trash(payload_key)
        outcomes.append(outcome)
    return PushResult(run.settle(), outcomes, run.published)


def _refuse(run: RunState, facts: GroupFacts) -> Pushed | None:
    """Why this group is not accepted, whatever room there is; None when it may be."""
    invalid = _invalid(run, facts)
    if invalid is not None:
        return invalid
    task = run.tasks.get(facts.task_id)
    if task is not None:
        return _judge(run, task, facts)
    if facts.lease_id:
        return _pushed(facts, PushKind.UNKNOWN_LEASE)
    if facts.generation > 0:
        return _named(facts, "generation", facts.generation, "0 for a task pushed without a lease")
    return None


def _invalid(run: RunState, facts: GroupFacts) -> Pushed | None:
    """What is wrong with the group itself."""
    if facts.lease_id:
        lease = LeaseId.parse(facts.lease_id)
        if lease is None or (lease.task_id, lease.generation) != (facts.task_id, facts.generation):
            return _named(facts, "lease_id", facts.lease_id, "task_id/generation/attempt of this group")
    if facts.size_bytes > run.policy.max_queued_bytes:
        return _named(facts, "payload", facts.size_bytes, f"at most {run.policy.max_queued_bytes} bytes")
    if 0 < run.policy.max_queued_tokens < facts.tokens:
        return _named(facts, "tokens", facts.tokens, f"at most {run.policy.max_queued_tokens}")
    return None


def _judge(run: RunState, task: Task, facts: GroupFacts) -> Pushed | None:
    """Whether the task still wants this attempt's result; attempt 0 is a push without a lease."""
    attempt = _attempt(facts)
    if facts.generation < task.generation:
        return _counted(run, facts, PushKind.CLOSED)
    if facts.generation > task.generation:
        if not facts.lease_id:
            return _counted(run, facts, PushKind.CLOSED)
        return _pushed(facts, PushKind.UNKNOWN_LEASE)
    if attempt > task.attempt:
        return _pushed(facts, PushKind.UNKNOWN_LEASE)
    if task.is_open:
        return None
    return _counted(run, facts, PushKind.DUPLICATE if task.accepted_attempt == attempt else PushKind.CLOSED)


def _place(run: RunState, facts: GroupFacts, payload_key: str, *, line_is_blocked: bool) -> Pushed:
    """Queue an acceptable group, or do with it what the overflow action says."""
    task = run.tasks.get(facts.task_id)
    action = run.policy.overflow_action
    if line_is_blocked or (not run.queue.fits(run.policy, facts) and action is OverflowAction.BLOCK):
        _keep_alive(run, task, facts)
        return Pushed(PushKind.BLOCKED, group_id(facts.task_id, facts.generation), payload_key)
    while not run.queue.fits(run.policy, facts):
        if action is OverflowAction.REJECT:
            return _counted(run, facts, PushKind.REJECTED_FULL)
        run.drop_oldest()
    _accept(run, task or _leaseless_task(run, facts), facts, payload_key)
    return _pushed(facts, PushKind.QUEUED)


def _accept(run: RunState, task: Task, facts: GroupFacts, payload_key: str) -> None:
    if task.state == TaskState.PENDING:
        run.pending.remove(task)
    run.leases.close(task)
    run.move_task(task, TaskState.COMPLETED)
    task.accepted_attempt = _attempt(facts)
    task.continuation = None
    run.enqueue(run.new_group(task, facts, payload_key))


def _leaseless_task(run: RunState, facts: GroupFacts) -> Task:
    task = run.tasks[facts.task_id] = Task(facts.task_id, sequence=0, leaseless=True)
    return task


def _keep_alive(run: RunState, task: Task | None, facts: GroupFacts) -> None:
    """While a push waits for space, the service stands in for the worker's heartbeats."""
    if task is None or task.lease is None or task.lease_id != facts.lease_id:
        return
    if task.lease.expiry >= run.now:
        prolong(run, task)


def _attempt(facts: GroupFacts) -> int:
    """The attempt that made the group, 0 without a lease."""
    lease = LeaseId.parse(facts.lease_id)
    return lease.attempt if lease else 0


_COUNTERS = {
    PushKind.DUPLICATE: "pushes_duplicate",
    PushKind.CLOSED: "pushes_closed",
    PushKind.REJECTED_FULL: "pushes_rejected",
}


def _counted(run: RunState, facts: GroupFacts, kind: PushKind) -> Pushed:
    run.count(_COUNTERS[kind])
    return _pushed(facts, kind)


def _pushed(facts: GroupFacts, kind: PushKind) -> Pushed:
    return Pushed(kind, group_id(facts.task_id, facts.generation))


def _named(facts: GroupFacts, field: str, value: object, limit: str) -> Pushed:
    name = group_id(facts.task_id, facts.generation)
    return Pushed(PushKind.INVALID, name, field=field, value=str(value), limit=limit)
