"""Leases and results of evaluations' tasks: what differs from the queue's.

Invariants: a task is leased only to an engine whose version is the evaluation's; every result is wholly of that
version; an attempt that fails counts towards the cap, one that is interrupted does not.
"""

from collections.abc import Sequence
from dataclasses import replace

from buffer_service.domain.evaluations import MAX_ATTEMPTS, MAX_STORED_BYTES
from buffer_service.domain.ops import (
    GroupFacts,
    LeaseAsk,
    Leased,
    LeaseGrant,
    LeaseReturn,
    LeaseWait,
    Pushed,
    PushKind,
    ReturnKind,
    ReturnOutcome,
    TaskSink,
    Wanted,
)
from tests.oracle.evaluation_book import Evaluation, Task
from tests.oracle.records import Lease, Worker
from tests.oracle.rules.failures import backoff_ms
from tests.oracle.rules.identity import EvaluationTaskId, LeaseId, group_id
from tests.oracle.state import RunState

QUARANTINED = "quarantined"
EXPIRED = "lease expired"


def lease(run: RunState, ask: LeaseAsk, worker: Worker) -> Leased:
    """Lease up to max_tasks tasks; a repeat of the last granted request gets what is still live of its leases."""
    if worker.evaluation_request_id == ask.request_id:
        live = [find_live(run, lease_id, ask.worker_id, ask.instance_id) for lease_id in worker.evaluation_leases]
        return _reply(run, [_grant(*found) for found in live if found is not None])
    if run.paused:
        return _reply(run, [], LeaseWait.PAUSED)
    report = run.engines.reports.get(ask.engine_id)
    if report is not None and report.state == QUARANTINED:
        return _reply(run, [], LeaseWait.QUARANTINED)

    waiting = [evaluation for evaluation in run.evaluations.evaluations.values() if evaluation.count("pending")]
    same = [evaluation for evaluation in waiting if evaluation.version == ask.loaded]
    other = [evaluation for evaluation in waiting if evaluation.version != ask.loaded]
    granted: list[tuple[Evaluation, Task]] = []
    backing_off = False
    for evaluation in same:
        left = ask.max_tasks - len(granted)
        due = evaluation.due(run.now)[:left]
        for task in due:
            _lease(run, task, ask, worker)
        granted += [(evaluation, task) for task in due]
        backing_off = backing_off or (len(due) < left and evaluation.count("pending") > 0)
    if granted:
        worker.evaluation_request_id = ask.request_id
        worker.evaluation_leases = [evaluation.lease_id(task) for evaluation, task in granted]

    wait = None
    if backing_off:
        wait = LeaseWait.BACKING_OFF
    elif not granted and other and ask.max_tasks:
        wait = LeaseWait.ENGINE_STALE
    elif len(granted) < ask.max_tasks or not waiting:
        wait = LeaseWait.NO_TASKS
    target = next(iter(other), None)
    if not ask.max_tasks:
        target = next(iter(waiting), None)
    elif granted or backing_off:
        target = None
    wanted = Wanted(target.version, target.manifest) if target and ask.would_load else None
    return _reply(run, [_grant(*found) for found in granted], wait, wanted)


def find_live(run: RunState, lease_id: str, worker_id: str, instance_id: str) -> tuple[Evaluation, Task] | None:
    """Evaluation and task of a lease that this process holds and that is not past its expiry."""
    evaluation, task, named = _find(run, lease_id)
    if evaluation is None or task is None or task.lease is None or named is None:
        return None
    if named.incarnation or task.attempt != named.attempt:
        return None
    held = (task.lease.worker_id, task.lease.instance_id) == (worker_id, instance_id)
    return (evaluation, task) if held and task.lease.expiry >= run.now else None


def prolong(run: RunState, task: Task) -> None:
    """The task's lease lasts a full time to live from now."""
    assert task.lease is not None
    task.lease = Lease(task.lease.worker_id, task.lease.instance_id, run.now + run.policy.lease_ttl_ms)
    run.changed = True


def take_back(run: RunState, evaluation: Evaluation, task: Task, given: LeaseReturn) -> ReturnOutcome:
    """A live lease is handed back."""
    if given.kind is ReturnKind.INTERRUPTED:
        reopen(run, task, 0)
    else:
        _fail(run, evaluation, task, given.error)
    return ReturnOutcome(task.state)


def repeated(run: RunState, facts: GroupFacts, payload_key: str) -> Pushed | None:
    """Answer a push of the very payload that is the task's result like the first one."""
    task = _find(run, facts.lease_id)[1]
    is_result = task is not None and task.payload_key == payload_key
    return _pushed(facts, PushKind.RECORDED) if is_result else None


def record(run: RunState, facts: GroupFacts, payload_key: str, missing: PushKind | None) -> Pushed:
    """Decide what becomes of a pushed group whose lease is of an evaluation."""
    evaluation, task, named = _find(run, facts.lease_id)
    if evaluation is None:
        return _pushed(facts, PushKind.UNKNOWN_LEASE if named is None else PushKind.CLOSED)
    if task is None or named is None or named.incarnation or named.attempt > task.attempt:
        return _pushed(facts, PushKind.UNKNOWN_LEASE)
    refused = _judge(task, facts, named.attempt) or _check_group(evaluation, task, facts)
    stored = run.evaluations.stored_bytes - len(task.spec) + facts.size_bytes
    if refused is None and stored > MAX_STORED_BYTES:
        refused = replace(_named(facts, "stored_bytes", stored, str(MAX_STORED_BYTES)), kind=PushKind.EVALUATIONS_FULL)
    if refused is None and missing:
        refused = _pushed(facts, missing)
    if refused is not None:
        return refused
    _end(run, evaluation, task, "finished", facts.size_bytes)
    task.payload_key, task.accepted = payload_key, named.attempt
    return _pushed(facts, PushKind.RECORDED)


def expire(run: RunState, limit: int | None = None) -> int:
    """Take back the leases that are due, at most `limit`; returns how many."""
    due = [
        (one.expiry, f"{found.number:015d}{found.task_id(task)}", found, task)
        for found, task, one in run.evaluations.leased()
        if one.expiry < run.now
    ]
    taken = sorted(due, key=lambda one: one[:2])[:limit]
    for _, _, evaluation, task in taken:
        _fail(run, evaluation, task, EXPIRED)
    return len(taken)


def reopen(run: RunState, task: Task, not_before: int) -> None:
    """A leased task is pending again."""
    close(run, task)
    task.state, task.not_before = "pending", not_before
    run.changed = True


def close(run: RunState, task: Task) -> None:
    """The task's lease ends, if there is one."""
    if task.lease is not None:
        run.leases.workers[task.lease.worker_id].evaluating.remove(task)
        task.lease = None


def _find(run: RunState, lease_id: str) -> tuple[Evaluation | None, Task | None, LeaseId | None]:
    """Evaluation and task that a lease is or was of, and its id; None for what is no lease of an evaluation's task."""
    lease_of = LeaseId.parse(lease_id)
    named = EvaluationTaskId.parse(lease_of.task_id) if lease_of else None
    if named is None:
        return None, None, None
    evaluation = run.evaluations.evaluations.get(named.eval_id)
    if evaluation is None or evaluation.number != named.number:
        return None, None, lease_of
    return evaluation, evaluation.tasks[named.index] if named.index < len(evaluation.tasks) else None, lease_of


def _lease(run: RunState, task: Task, ask: LeaseAsk, worker: Worker) -> None:
    task.state = "leased"
    task.attempt += 1
    task.lease = Lease(ask.worker_id, ask.instance_id, run.now + run.policy.lease_ttl_ms)
    worker.evaluating.append(task)
    run.changed = True


def _end(run: RunState, evaluation: Evaluation, task: Task, state: str, size: int) -> None:
    close(run, task)
    task.state = state
    evaluation.stored_bytes += size - len(task.spec)
    evaluation.ended.append(task)
    run.changed = True


def _fail(run: RunState, evaluation: Evaluation, task: Task, why: str) -> None:
    task.failures += 1
    task.error = why
    if task.failures < MAX_ATTEMPTS:
        reopen(run, task, run.now + backoff_ms(run.policy, task.failures))
    else:
        _end(run, evaluation, task, "failed", 0)


def _judge(task: Task, facts: GroupFacts, attempt: int) -> Pushed | None:
    """Tell whether the task still wants this attempt's result."""
    if task.accepted == attempt:
        return _pushed(facts, PushKind.DUPLICATE)
    return _pushed(facts, PushKind.CLOSED) if task.state in ("finished", "failed") else None


def _check_group(evaluation: Evaluation, task: Task, facts: GroupFacts) -> Pushed | None:
    version, head, tail = evaluation.version, facts.head, facts.tail
    if facts.task_id != task.task_id:
        return _named(facts, "task_id", facts.task_id, f"{task.task_id}, the task of the lease")
    if facts.incarnation:
        return _named(facts, "incarnation", facts.incarnation, "0 for the task of an evaluation")
    if (size := facts.trajectories or facts.samples) != task.group_size:
        what = f"{size} {'samples' if size == facts.samples else 'trajectories'}"
        return _named(facts, "samples", what, f"{task.group_size}, the group_size of the task")
    if (head, tail) != (version, version):
        found = f"versions {head.term}.{head.version} to {tail.term}.{tail.version}"
        limit = f"{version.term}.{version.version} alone, which is evaluated"
        return _named(facts, "samples.spans.version", found, limit)
    return None


def _pushed(facts: GroupFacts, kind: PushKind) -> Pushed:
    return Pushed(kind, group_id(facts.task_id, facts.incarnation), sink=TaskSink.EVALUATIONS)


def _named(facts: GroupFacts, field: str, value: object, limit: str) -> Pushed:
    return replace(_pushed(facts, PushKind.INVALID), field=field, value=str(value), limit=limit)


def _grant(evaluation: Evaluation, task: Task) -> LeaseGrant:
    lease_id = evaluation.lease_id(task)
    return LeaseGrant(lease_id, task.task_id, 0, task.attempt, task.spec, b"", evaluation.version)


def _reply(
    run: RunState, grants: Sequence[LeaseGrant], wait: LeaseWait | None = None, wanted: Wanted | None = None
) -> Leased:
    return Leased(run.settle(), grants, wait, run.published, 0, run.policy.lease_ttl_ms, wanted)
