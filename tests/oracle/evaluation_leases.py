"""The workers' side of evaluations: lease, extend, finish, expire.

Invariants: a task is leased only to an engine whose version is the evaluation's; every result is wholly of that
version; an attempt that fails counts towards the cap, one that is interrupted does not.
"""

from collections.abc import Sequence

from buffer_service.domain.evaluations import (
    EXPIRED,
    MAX_ATTEMPTS,
    MAX_STORED_BYTES,
    EvaluationAsk,
    EvaluationGrant,
    EvaluationLeased,
    EvaluationOutcome,
    FinishEvaluation,
    FinishKind,
    Wanted,
)
from buffer_service.domain.ops import Extended, LeaseState, LeaseWait
from buffer_wire.errors import EvaluationsFull, InvalidField, UnknownLease
from buffer_wire.revision import Revision
from tests.oracle.evaluation_book import Evaluation, Task, Worker
from tests.oracle.records import Lease
from tests.oracle.rules.failures import backoff_ms
from tests.oracle.state import RunState

QUARANTINED = "quarantined"
EXPIRIES_PER_LEASE = 100


def lease(run: RunState, ask: EvaluationAsk) -> EvaluationLeased:
    """Lease up to max_tasks tasks; a repeat of the last granted request gets what is still live of its leases."""
    expire(run, EXPIRIES_PER_LEASE)
    book = run.evaluations
    worker = _release_former(run, ask)
    if worker is not None and worker.request_id == ask.request_id:
        live = [_find_live(run, lease_id, ask.worker_id, ask.instance_id) for lease_id in worker.granted]
        return _reply(run, [_grant(*found) for found in live if found is not None])
    if run.paused:
        return _reply(run, [], LeaseWait.PAUSED)
    report = run.engines.reports.get(ask.engine_id)
    if report is not None and report.state == QUARANTINED:
        return _reply(run, [], LeaseWait.QUARANTINED)

    waiting = [evaluation for evaluation in book.evaluations.values() if evaluation.count("pending")]
    same = [evaluation for evaluation in waiting if evaluation.version == ask.loaded]
    other = [evaluation for evaluation in waiting if evaluation.version != ask.loaded]
    granted: list[tuple[Evaluation, Task]] = []
    backing_off = False
    for evaluation in same:
        left = ask.max_tasks - len(granted)
        due = evaluation.due(run.now)[:left]
        for task in due:
            _lease(run, task, ask)
        granted += [(evaluation, task) for task in due]
        backing_off = backing_off or (len(due) < left and evaluation.count("pending") > 0)
    if granted:
        lease_ids = [evaluation.lease_id(task) for evaluation, task in granted]
        book.workers[ask.worker_id] = Worker(ask.instance_id, ask.request_id, lease_ids)

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


def extend(run: RunState, worker_id: str, instance_id: str, lease_ids: Sequence[str]) -> Extended:
    """Prolong the leases that are live."""
    states = []
    for lease_id in lease_ids:
        found = _find_live(run, lease_id, worker_id, instance_id)
        if found is not None:
            found[1].lease = Lease(worker_id, instance_id, run.now + run.policy.lease_ttl_ms)
            run.changed = True
        states.append(LeaseState.LIVE if found else LeaseState.LOST)
    return Extended(run.settle(), states, run.policy.lease_ttl_ms)


def finish(run: RunState, request: FinishEvaluation) -> tuple[Revision, EvaluationOutcome]:
    """End a lease."""
    evaluation, task, attempt = _parse(run, request.lease_id)
    if evaluation is None:
        return run.settle(), EvaluationOutcome.CLOSED
    if task is None or attempt > task.attempt:
        raise UnknownLease(request.lease_id)
    if request.kind is FinishKind.GROUP:
        return _finish_with_group(run, evaluation, task, attempt, request)
    if _find_live(run, request.lease_id, request.worker_id, request.instance_id) is None:
        return run.settle(), EvaluationOutcome.CLOSED
    if request.kind is FinishKind.INTERRUPTED:
        _reopen(run, task, 0)
    else:
        _fail(run, evaluation, task, request.error)
    return run.settle(), EvaluationOutcome(task.state)


def expire(run: RunState, limit: int | None = None) -> int:
    """Take back the leases that are due, at most `limit`; returns how many."""
    book = run.evaluations
    due = [
        (one.expiry, f"{found.number}/{found.eval_id}/{task.index}", found, task)
        for found, task, one in book.leased()
        if one.expiry < run.now
    ]
    lapsed = [lease_id for lease_id, one in book.lapsing.items() if one.expiry < run.now]
    for _, _, evaluation, task in sorted(due, key=lambda one: one[:2])[:limit]:
        _fail(run, evaluation, task, EXPIRED)
    for lease_id in lapsed:
        del book.lapsing[lease_id]
        run.changed = True
    book.forget_idle()
    return len(due) + len(lapsed)


def _release_former(run: RunState, ask: EvaluationAsk) -> Worker | None:
    """The record of the asking process; what a former one held is pending again."""
    book = run.evaluations
    worker = book.workers.get(ask.worker_id)
    if worker is None or worker.instance_id == ask.instance_id:
        return worker
    for _, task, one in list(book.leased()):
        if one.worker_id == ask.worker_id:
            _reopen(run, task, 0)
    for lease_id, one in list(book.lapsing.items()):
        if one.worker_id == ask.worker_id:
            del book.lapsing[lease_id]
            run.changed = True
    book.forget_idle()
    return None


def _parse(run: RunState, lease_id: str) -> tuple[Evaluation | None, Task | None, int]:
    """Evaluation, task and attempt that a lease is or was of. Raises UnknownLease for what is no lease id."""
    parts = lease_id.split("/")
    numbers = parts[1:]
    if len(parts) != 4 or not parts[0] or not all(one.isascii() and one.isdecimal() for one in numbers):
        raise UnknownLease(lease_id)
    if len(numbers[0]) > 15 or len(numbers[1]) > 4 or len(numbers[2]) > 15 or numbers[2].startswith("0"):
        raise UnknownLease(lease_id)
    number, index, attempt = map(int, numbers)
    evaluation = run.evaluations.evaluations.get(parts[0])
    if evaluation is None or evaluation.number != number:
        return None, None, attempt
    return evaluation, evaluation.tasks[index] if index < len(evaluation.tasks) else None, attempt


def _find_live(run: RunState, lease_id: str, worker_id: str, instance_id: str) -> tuple[Evaluation, Task] | None:
    try:
        evaluation, task, attempt = _parse(run, lease_id)
    except UnknownLease:
        return None
    if evaluation is None or task is None or task.lease is None or task.attempt != attempt:
        return None
    held = (task.lease.worker_id, task.lease.instance_id) == (worker_id, instance_id)
    return (evaluation, task) if held and task.lease.expiry >= run.now else None


def _lease(run: RunState, task: Task, ask: EvaluationAsk) -> None:
    task.state = "leased"
    task.attempt += 1
    task.lease = Lease(ask.worker_id, ask.instance_id, run.now + run.policy.lease_ttl_ms)
    run.changed = True


def _reopen(run: RunState, task: Task, not_before: int) -> None:
    task.state, task.lease, task.not_before = "pending", None, not_before
    run.evaluations.forget_idle()
    run.changed = True


def _end(run: RunState, evaluation: Evaluation, task: Task, state: str, size: int) -> None:
    task.state, task.lease = state, None
    evaluation.stored_bytes += size - len(task.spec)
    evaluation.ended.append(task)
    run.evaluations.forget_idle()
    run.changed = True


def _fail(run: RunState, evaluation: Evaluation, task: Task, why: str) -> None:
    task.failures += 1
    task.error = why
    if task.failures < MAX_ATTEMPTS:
        _reopen(run, task, run.now + backoff_ms(run.policy, task.failures))
    else:
        _end(run, evaluation, task, "failed", 0)


def _finish_with_group(
    run: RunState, evaluation: Evaluation, task: Task, attempt: int, request: FinishEvaluation
) -> tuple[Revision, EvaluationOutcome]:
    if task.accepted == attempt:
        return run.settle(), EvaluationOutcome.DUPLICATE
    if task.state in ("finished", "failed"):
        return run.settle(), EvaluationOutcome.CLOSED
    _check_group(evaluation, task, request)
    stored = run.evaluations.stored_bytes - len(task.spec) + len(request.body)
    if stored > MAX_STORED_BYTES:
        raise EvaluationsFull("stored_bytes", stored, MAX_STORED_BYTES)
    _end(run, evaluation, task, "finished", len(request.body))
    task.payload_key, task.accepted = run.payloads.put(request.body), attempt
    return run.settle(), EvaluationOutcome.ACCEPTED


def _check_group(evaluation: Evaluation, task: Task, request: FinishEvaluation) -> None:
    version, head, tail = evaluation.version, request.head, request.tail
    if request.task_id != task.task_id:
        raise InvalidField("group.header.task_id", request.task_id, f"{task.task_id}, the task of the lease")
    if request.samples != task.group_size:
        limit = f"{task.group_size}, the group_size of the task"
        raise InvalidField("group.header.samples", f"{request.samples} samples", limit)
    if (head, tail) != (version, version):
        found = f"versions {head.epoch}.{head.version} to {tail.epoch}.{tail.version}"
        limit = f"of version {version.epoch}.{version.version} alone, which is evaluated"
        raise InvalidField("group.header.samples.spans", found, limit)


def _grant(evaluation: Evaluation, task: Task) -> EvaluationGrant:
    return EvaluationGrant(evaluation.lease_id(task), task.task_id, evaluation.version, task.attempt, task.spec)


def _reply(
    run: RunState, grants: Sequence[EvaluationGrant], wait: LeaseWait | None = None, wanted: Wanted | None = None
) -> EvaluationLeased:
    return EvaluationLeased(run.settle(), grants, wait, wanted, run.policy.lease_ttl_ms)
