"""Push: what becomes of a finished group.

Invariants: at most one group is accepted for a task's incarnation, whichever attempt made it, and accepting it ends the
live lease; a push never exceeds a cap or a quota; no blocked push overtakes another, whichever call it came with.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import assert_never

from buffer_service.domain.ops import (
    PORTION,
    GroupFacts,
    NewGroup,
    Pushed,
    PushKind,
    PushResult,
    TaskSink,
    WeightVersion,
    is_of_stage,
    sink_of,
)
from buffer_service.domain.ops.groups import STAGING_AGE_MS
from buffer_service.domain.policy import MAX_ENVIRONMENTS, REWARDS, OverflowAction, StaleAction
from buffer_service.rules.transitions import GroupState, TaskState
from tests.oracle import evaluation_leases, stages
from tests.oracle.leasing import prolong
from tests.oracle.records import Group, Payloads, Task
from tests.oracle.rules.filters import acceptance_ppm, has_filter, why_filtered
from tests.oracle.rules.identity import LeaseId, group_id
from tests.oracle.state import RunState


def written_key(group: NewGroup) -> str:
    """Key of a body that its pusher has written."""
    return f"written-{group.nonce.hex()}-{group.facts.size_bytes}"


def push(run: RunState, groups: Iterable[tuple[GroupFacts, str]], *, retry: bool = False) -> PushResult:
    """Judge groups, whose payloads are stored under the given keys, one after another. `retry`: they were blocked."""
    run.require_store()
    outcomes: list[Pushed] = []
    for facts, payload_key in groups:
        if len(outcomes) % PORTION == 0:
            run.settle()
        outcome = _repeated(run, facts, payload_key)
        if outcome is None:
            missing = _missing(run, facts, payload_key, retry=retry)
            outcome = _judged(run, facts, payload_key, missing)
            _settle_payload(run.payloads, facts, payload_key, outcome.kind)
        if outcome.kind is not PushKind.BLOCKED:
            run.line.leave(payload_key)
            run.staged.pop(payload_key, None)
        outcomes.append(outcome)
    return PushResult(run.settle(), outcomes, run.published)


def _repeated(run: RunState, facts: GroupFacts, payload_key: str) -> Pushed | None:
    """Answer a push of the very payload that was accepted before like the first one."""
    if sink_of(facts.lease_id) is TaskSink.EVALUATIONS:
        return evaluation_leases.repeated(run, facts, payload_key)
    if is_of_stage(facts.lease_id):
        return stages.repeated(run, facts, payload_key)
    task = run.tasks.get(facts.task_id)
    if task is None or task.accepted_key != payload_key:
        return None
    return _pushed(facts, PushKind.FILTERED if task.filtered else PushKind.QUEUED)


def _missing(run: RunState, facts: GroupFacts, payload_key: str, *, retry: bool) -> PushKind | None:
    """Tell what is answered where a payload is needed and is not there; None where it is."""
    if payload_key in run.staged:
        return None
    if facts.stored:
        return None if run.payloads.is_free(payload_key, facts.size_bytes) else PushKind.PAYLOAD_MISSING
    return PushKind.GONE if retry else None


def _judged(run: RunState, facts: GroupFacts, payload_key: str, missing: PushKind | None) -> Pushed:
    if sink_of(facts.lease_id) is TaskSink.EVALUATIONS:
        return evaluation_leases.record(run, facts, payload_key, missing)
    if is_of_stage(facts.lease_id):
        return stages.take(run, facts, payload_key, missing)
    refused = _refuse(run, facts) or _filter(run, facts, payload_key)
    return refused or (_pushed(facts, missing) if missing else _place(run, facts, payload_key))


def _settle_payload(payloads: Payloads, facts: GroupFacts, payload_key: str, kind: PushKind) -> None:
    """Keep, delete or leave a payload as the outcome says."""
    if kind in {PushKind.QUEUED, PushKind.BLOCKED, PushKind.RECORDED, PushKind.ADDED}:
        payloads.claim(payload_key)
    elif facts.stored and kind is PushKind.REJECTED_FULL:
        payloads.release(payload_key)
    elif kind is not PushKind.PAYLOAD_MISSING:
        payloads.trash(payload_key)


def _refuse(run: RunState, facts: GroupFacts) -> Pushed | None:
    """Say why this group is not accepted, whatever room there is; None when it may be."""
    invalid = _invalid(run, facts)
    if invalid is not None:
        return invalid
    task = run.tasks.get(facts.task_id)
    refused = _judge_unknown(run, facts) if task is None else _judge(run, task, facts)
    if refused is None and not run.has_environment_left(facts.environment):
        limit = f"one of the run's {MAX_ENVIRONMENTS} environments"
        return _named(facts, "environment", facts.environment, limit)
    return refused


def _invalid(run: RunState, facts: GroupFacts) -> Pushed | None:
    """Return what is wrong with the group itself."""
    if facts.lease_id:
        lease = LeaseId.parse(facts.lease_id)
        if lease is None or (lease.task_id, lease.incarnation) != (facts.task_id, facts.incarnation):
            return _named(facts, "lease_id", facts.lease_id, "task_id/incarnation/attempt of this group")
    if facts.tail.term > run.term:
        limit = f"at most {run.term}, the term of the run"
        return _named(facts, "samples.spans.version.term", facts.tail.term, limit)
    if _is_unheard_of(run, facts.tail):
        limit = f"at most {run.published.version}, the version that is published, or one that a plan announces"
        return _named(facts, "samples.spans.version", facts.tail.version, limit)
    if facts.size_bytes > run.policy.max_queued_bytes:
        return _named(facts, "payload", facts.size_bytes, f"at most {run.policy.max_queued_bytes} bytes")
    if 0 < run.policy.max_queued_tokens < facts.tokens:
        return _named(facts, "tokens", facts.tokens, f"at most {run.policy.max_queued_tokens}")
    return None


def _is_unheard_of(run: RunState, made_by: WeightVersion) -> bool:
    """True for weights of this term that were neither published nor announced; those of earlier ones are clamped."""
    announced = run.plan.version if run.plan is not None else 0
    return made_by.term == run.term and made_by.version > max(run.published.version, announced)


def _judge_unknown(run: RunState, facts: GroupFacts) -> Pushed | None:
    """Tell whether a push may make its task."""
    if facts.lease_id:
        return _pushed(facts, PushKind.UNKNOWN_LEASE)
    if facts.incarnation > 0:
        return _named(facts, "incarnation", facts.incarnation, "0 for a task pushed without a lease")
    if facts.task_id in run.remembered:
        return _counted(run, facts, PushKind.CLOSED)
    if 0 < facts.first_revision < run.forgotten:
        limit = f"at least {run.forgotten}: what was accepted before may have been forgotten"
        refused = _named(facts, "first_revision", facts.first_revision, limit)
        return replace(refused, kind=PushKind.FORGOTTEN)
    return None


def _judge(run: RunState, task: Task, facts: GroupFacts) -> Pushed | None:
    """Tell whether the task still wants this attempt's result; attempt 0 is a push without a lease."""
    attempt = _attempt(facts)
    if facts.incarnation < task.incarnation:
        return _counted(run, facts, PushKind.CLOSED)
    if facts.incarnation > task.incarnation:
        if not facts.lease_id:
            return _counted(run, facts, PushKind.CLOSED)
        return _pushed(facts, PushKind.UNKNOWN_LEASE)
    if attempt > task.attempt:
        return _pushed(facts, PushKind.UNKNOWN_LEASE)
    if task.is_open:
        return None
    return _counted(run, facts, PushKind.DUPLICATE if task.accepted_attempt == attempt else PushKind.CLOSED)


def _filter(run: RunState, facts: GroupFacts, payload_key: str) -> Pushed | None:
    """Accept and end an acceptable group that does not pass the filter."""
    why = _why_filtered(run, facts)
    if why is None:
        return None
    group = _complete(run, facts, payload_key)
    group.task.filtered = True
    run.move_group(group, GroupState.FILTERED)
    run.end_group(group)
    run.count(why)
    return _pushed(facts, PushKind.FILTERED)


def _place(run: RunState, facts: GroupFacts, payload_key: str) -> Pushed:
    """Queue an acceptable group, or do with it what the overflow action says."""
    action = run.policy.overflow_action
    match action:
        case OverflowAction.BLOCK:
            if not run.line.admits(payload_key, run.now) or not run.has_room(facts.tokens, facts.size_bytes):
                return _block(run, facts, payload_key)
        case OverflowAction.REJECT:
            if not run.has_room(facts.tokens, facts.size_bytes):
                if _attempt(facts) and (run.policy.stale_action is StaleAction.WAIT or run.has_window):
                    run.refused = facts.tokens, facts.size_bytes
                return _counted(run, facts, PushKind.REJECTED_FULL)
        case OverflowAction.DROP_OLDEST:
            while not run.has_room(facts.tokens, facts.size_bytes):
                if not run.make_way():
                    return _counted(run, facts, PushKind.REJECTED_FULL)
        case _:
            assert_never(action)
    group = _complete(run, facts, payload_key)
    group.stage = stages.following(run, group)
    run.enqueue(group)
    run.after_accept = run.policy, run.group_ledger.states[GroupState.QUEUED], run.live()
    return _pushed(facts, PushKind.QUEUED)


def _block(run: RunState, facts: GroupFacts, payload_key: str) -> Pushed:
    """The group waits in line; while it does, the service stands in for the worker's heartbeats."""
    run.staged[payload_key] = run.now
    if run.line.wait(payload_key, run.now):
        run.changed = True
    task = run.tasks.get(facts.task_id)
    lease = task.lease if task is not None and task.lease_id == facts.lease_id else None
    if task is not None and lease is not None and lease.expiry >= run.now:
        prolong(run, task)
    return Pushed(PushKind.BLOCKED, group_id(facts.task_id, facts.incarnation), payload_key)


def give_up(run: RunState) -> None:
    """Blocked pushes that nobody has tried for long lose their payloads."""
    for payload_key, tried in list(run.staged.items()):
        if tried <= run.now - STAGING_AGE_MS:
            abandon(run, payload_key)


def abandon(run: RunState, payload_key: str) -> None:
    """A blocked push ends."""
    run.payloads.trash(payload_key)
    run.line.leave(payload_key)
    run.staged.pop(payload_key, None)


def _complete(run: RunState, facts: GroupFacts, payload_key: str) -> Group:
    """The task is completed with this group, which is new."""
    task = run.tasks.get(facts.task_id) or _leaseless_task(run, facts)
    if task.state == TaskState.PENDING:
        run.pending.remove(task)
    run.leases.close(task)
    run.move_task(task, TaskState.COMPLETED)
    task.accepted_attempt, task.accepted_key = _attempt(facts), payload_key
    run.leaseless |= not task.accepted_attempt
    is_last_lease = 0 < task.attempt == task.accepted_attempt
    if facts.failed_samples:
        run.starts.of(facts.environment).failed_samples += facts.failed_samples
    run.totals.accept(facts, run.now - task.granted_ms if is_last_lease else None)
    if facts.stored:
        run.count("written_groups")
        run.count("written_bytes", facts.size_bytes)
    task.partial_rollout = None
    run.environments.add(facts.environment)
    group = run.new_group(task, facts, payload_key)
    passed = _why_filtered(run, facts) is None
    if has_filter(run.policy) and not (passed and REWARDS in run.policy.stages):
        before = run.statistics["recent_acceptance_ppm"]
        run.statistics["recent_acceptance_ppm"] = acceptance_ppm(before, passed=passed)
    return group


def _why_filtered(run: RunState, facts: GroupFacts) -> str | None:
    """The filter that a pushed group meets; rewards that a stage is to write are judged when it has."""
    return why_filtered(run.policy, facts, judge="lengths" if REWARDS in run.policy.stages else "")


def _leaseless_task(run: RunState, facts: GroupFacts) -> Task:
    task = Task(facts.task_id, sequence=0, environment=facts.environment, leaseless=True)
    run.tasks[facts.task_id] = task
    return task


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
    return Pushed(kind, group_id(facts.task_id, facts.incarnation))


def _named(facts: GroupFacts, field: str, value: object, limit: str) -> Pushed:
    name = group_id(facts.task_id, facts.incarnation)
    return Pushed(PushKind.INVALID, name, field=field, value=str(value), limit=limit)
