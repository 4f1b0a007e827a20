"""Leases: lease, extend, give back, expire.

Invariants: a task has at most one live lease; a lease that is lost can neither be extended nor given back; an attempt
that fails counts towards max_attempts, one that is interrupted or cancelled does not.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from buffer_service.domain.admission import NO_OPEN_STEP, OpenStep, capacity, required_version
from buffer_service.domain.gate import oldest_useful_version, too_stale
from buffer_service.domain.ops import (
    Extended,
    LeaseAsk,
    Leased,
    LeaseGrant,
    LeaseReturn,
    LeaseState,
    LeaseWait,
    Returned,
    ReturnKind,
    ReturnOutcome,
    TaskFailure,
    TaskSink,
    is_of_stage,
    sink_of,
)
from buffer_service.domain.policy import Order, StaleAction
from buffer_service.domain.steering.knobs import lookahead_milli
from buffer_service.rules.transitions import TaskState
from tests.oracle import evaluation_leases, fresh_start, stages
from tests.oracle.records import Lease, PartialRollout, Task, Worker
from tests.oracle.rules.failures import backoff_ms
from tests.oracle.rules.spread import too_spread
from tests.oracle.state import RunState

EXPIRED = "lease expired"
QUARANTINED = "quarantined"

EXPIRIES_PER_LEASE = 100
"""A lease request takes back so many at most; the sweep takes all."""


def lease(run: RunState, ask: LeaseAsk) -> Leased:
    """Lease up to max_tasks tasks; a repeat of the last granted request gets what is still live of its leases."""
    if ask.sink is TaskSink.EVALUATIONS:
        evaluation_leases.expire(run, EXPIRIES_PER_LEASE)
        return evaluation_leases.lease(run, ask, _worker(run, ask))
    expire(run, EXPIRIES_PER_LEASE)
    return _lease_of_queue(run, ask, _worker(run, ask))


def _lease_of_queue(run: RunState, ask: LeaseAsk, worker: Worker) -> Leased:
    if ask.request_id and worker.request_id == ask.request_id:
        still_live = [task for task, lease_id in worker.granted if task.lease and task.lease_id == lease_id]
        return _reply(run, still_live)
    refusal, required = _refusal(run, ask)
    if refusal is not None:
        return _reply(run, [], refusal, required)
    loaded = run.timeline.effective(ask.loaded)
    fresh_room, room = _room(run), _room(run, max(0, run.published.version - loaded))
    if too_stale(run.policy, train_version=run.train_version, head_version=loaded):
        # What it begins is fresh enough for a step that lacks groups alone.
        left = run.missing - len(run.queue) - len(run.leases)
        room = left if room is None else min(room, left)
    granted, full = _grant(run, ask, ask.max_tasks if room is None else max(0, min(room, ask.max_tasks)))
    if granted:
        worker.request_id = ask.request_id
        worker.granted = [(task, task.lease_id) for task in granted]
    if full or len(granted) == ask.max_tasks:
        return _reply(run, granted)
    if fresh_room is not None and len(granted) >= fresh_room:
        return _reply(run, granted, LeaseWait.AT_CAPACITY)
    if (room is None or len(granted) < room) and (limited := _limited(run)):
        return replace(_reply(run, granted, LeaseWait.RATE_LIMITED), **limited)
    return _reply_to_less(run, granted)


def _limited(run: RunState) -> dict[str, Any]:
    """The environment with a task that may begin first of those that may not begin now, and in how many ms."""
    waits = [
        (run.starts.wait_ms(run.policy, environment, run.now), environment)
        for environment in run.pending.environments(run.now)
    ]
    for_ms, environment = min((one for one in waits if one[0]), default=(0, ""))
    return {"limited_environment": environment, "limited_for_ms": for_ms} if for_ms else {}


def _reply_to_less(run: RunState, granted: list[Task]) -> Leased:
    """The reply to a request that got less than it asked for, though there is room for an engine with new weights."""
    if run.pending.pick(run.now, run.mixture, run.lease_turns) is not None:
        return _reply(run, granted, LeaseWait.ENGINE_STALE, _required_version(run))
    return _reply(run, granted, LeaseWait.BACKING_OFF if len(run.pending) else LeaseWait.NO_TASKS)


def extend(run: RunState, worker_id: str, instance_id: str, lease_ids: Sequence[str]) -> Extended:
    """Prolong the leases that are live; take back those whose group could no longer be fresh."""
    states = []
    for lease_id in lease_ids:
        if sink_of(lease_id) is TaskSink.EVALUATIONS:
            states.append(_prolong_evaluation(run, worker_id, instance_id, lease_id))
            continue
        if is_of_stage(lease_id):
            is_live = stages.extend(run, worker_id, instance_id, lease_id)
            states.append(LeaseState.LIVE if is_live else LeaseState.LOST)
            continue
        task = run.leases.live(lease_id, worker_id, instance_id, run.now)
        states.append(LeaseState.LOST if task is None else _prolong_or_cancel(run, task))
    return Extended(run.settle(), states, run.policy.lease_ttl_ms)


def give_back(run: RunState, worker_id: str, instance_id: str, returns: Sequence[LeaseReturn]) -> Returned:
    """Hand leases back, one after another."""
    outcomes = []
    for given in returns:
        if sink_of(given.lease_id) is TaskSink.EVALUATIONS:
            found = evaluation_leases.find_live(run, given.lease_id, worker_id, instance_id)
            outcomes.append(evaluation_leases.take_back(run, *found, given) if found else ReturnOutcome.LOST)
            continue
        if is_of_stage(given.lease_id):
            outcomes.append(stages.take_back(run, worker_id, instance_id, given))
            continue
        task = run.leases.live(given.lease_id, worker_id, instance_id, run.now)
        outcomes.append(ReturnOutcome.LOST if task is None else _take_back(run, task, given))
    return Returned(run.settle(), outcomes)


def expire(run: RunState, limit: int | None = None) -> int:
    """Take back the due leases of the queue's tasks, at most `limit`, earliest expiry first; returns how many."""
    expired = 0
    while expired != limit and (task := run.leases.next_due(run.now)) is not None:
        _fail(run, task, EXPIRED)
        run.count("leases_expired")
        expired += 1
    return expired


def prolong(run: RunState, task: Task) -> None:
    """The task's lease lasts a full time to live from now."""
    if task.lease is not None:
        run.leases.prolong(task, task.lease, run.now + run.policy.lease_ttl_ms)
        run.changed = True


def _prolong_evaluation(run: RunState, worker_id: str, instance_id: str, lease_id: str) -> LeaseState:
    found = evaluation_leases.find_live(run, lease_id, worker_id, instance_id)
    if found is None:
        return LeaseState.LOST
    evaluation_leases.prolong(run, found[1])
    return LeaseState.LIVE


def _worker(run: RunState, ask: LeaseAsk) -> Worker:
    """The record of the asking process; one that replaced another releases its leases."""
    worker = run.leases.workers.get(ask.worker_id)
    if worker is None or worker.instance_id != ask.instance_id:
        for task in list(worker.leased.values()) if worker else []:
            _interrupt(run, task)
        for evaluated in list(worker.evaluating) if worker else []:
            evaluation_leases.reopen(run, evaluated, 0)
        worker = run.leases.workers[ask.worker_id] = Worker(ask.instance_id)
    worker.heard_ms = run.now
    return worker


def _refusal(run: RunState, ask: LeaseAsk) -> tuple[LeaseWait | None, int]:
    """Say why this engine gets nothing, whatever is pending, and the version that it needs."""
    report = run.engines.reports.get(ask.engine_id)
    if run.paused:
        return LeaseWait.PAUSED, 0
    if run.draining:
        return LeaseWait.DRAINING, 0
    if report is not None and report.state == QUARANTINED:
        return LeaseWait.QUARANTINED, 0
    loaded = run.timeline.effective(ask.loaded)
    if too_stale(run.policy, train_version=run.first_train_version, head_version=loaded):
        return LeaseWait.ENGINE_STALE, oldest_useful_version(run.policy, run.first_train_version)
    if fresh_start.is_due(run, ask):
        return LeaseWait.ENGINE_STALE, run.published.version
    return None, 0


def _room(run: RunState, behind: int = 0) -> int | None:
    """Room for an engine whose weights are so many versions older than the published ones."""
    return capacity(
        run.policy,
        unpublished_steps=run.unpublished_steps,
        open_step=_open_step(run),
        queued=len(run.queue),
        leased=len(run.leases),
        behind=behind,
        lookahead_milli=lookahead_milli(run.stated, run.decision.knobs),
        missing=run.missing,
    )


def _required_version(run: RunState) -> int:
    return required_version(
        run.policy,
        published=run.published.version,
        unpublished_steps=run.unpublished_steps,
        open_step=_open_step(run),
        queued=len(run.queue),
        leased=len(run.leases),
        missing=run.missing,
    )


def _open_step(run: RunState) -> OpenStep:
    step = run.steps.get(run.next_step)
    return OpenStep(step.form.target, len(step.groups)) if step else NO_OPEN_STEP


def _grant(run: RunState, ask: LeaseAsk, wanted: int) -> tuple[list[Task], bool]:
    """Return what is leased now, and whether the next one did not fit into the reply."""
    loaded = run.timeline.effective(ask.loaded)
    granted: list[Task] = []
    used = 0
    while len(granted) < wanted:
        task = run.pending.pick(
            run.now, run.mixture, run.lease_turns, lambda environment: run.starts.may(run.policy, environment, run.now)
        )
        if task is None:
            break
        size = _lease_bytes(task)
        if granted and used + size > ask.message_bytes // 2:
            return granted, True
        used += size
        run.take_turn(run.lease_turns, task.environment)
        if size > ask.message_bytes:
            _give_up_partial_rollout(run, task)
        _drop_useless_partial_rollout(run, task, loaded)
        run.pending.remove(task)
        run.move_task(task, TaskState.LEASED)
        run.starts.take(run.policy, task.environment, run.now)
        task.attempt += 1
        task.granted_ms = run.now
        kept = task.partial_rollout
        task.lease_head = loaded if kept is None or kept.head is None else min(loaded, kept.head)
        task.awaited = task.lease_head if run.policy.stale_action is StaleAction.WAIT else None
        if run.policy.order is Order.SUBMISSION:
            run.take_place(task)
        task.holds_window = run.has_window
        run.leases.open(task, Lease(ask.worker_id, ask.instance_id, run.now + run.policy.lease_ttl_ms))
        run.count("leases_granted")
        granted.append(task)
    return granted, False


def _lease_bytes(task: Task) -> int:
    """Bytes of the payloads that a lease of the task carries, a partial rollout that is given up as it is
    leased included.
    """
    return len(task.spec) + (len(task.partial_rollout.body) if task.partial_rollout else 0)


def _drop_useless_partial_rollout(run: RunState, task: Task, loaded: int) -> None:
    """Drop what was generated with weights that are too old, by now or for this engine; it is generated again."""
    kept = task.partial_rollout
    if kept is None or kept.head is None:
        return
    if too_stale(run.policy, train_version=run.first_train_version, head_version=kept.head):
        _give_up_partial_rollout(run, task)
    elif too_spread(run.policy, loaded_version=loaded, head_version=kept.head):
        _give_up_partial_rollout(run, task)
        run.count("partial_rollouts_beyond_spread")


def _give_up_partial_rollout(run: RunState, task: Task) -> None:
    if task.partial_rollout is not None:
        run.count("partial_rollout_tokens_discarded", task.partial_rollout.tokens)
        task.partial_rollout = None


def _prolong_or_cancel(run: RunState, task: Task) -> LeaseState:
    """Prolong or cancel a live lease, as a heartbeat does; a policy that cancels measures staleness by heads."""
    stale = too_stale(run.policy, train_version=run.first_train_version, head_version=task.lease_head)
    if not (run.policy.cancel_stale_leases and stale):
        prolong(run, task)
        return LeaseState.LIVE
    run.count("leases_cancelled")
    _give_up_partial_rollout(run, task)
    task.came_back = True
    run.make_pending(task, run.now)
    return LeaseState.CANCELLED


def _take_back(run: RunState, task: Task, given: LeaseReturn) -> ReturnOutcome:
    run.count("leases_returned")
    if given.partial_rollout:
        head = None if given.head is None else run.timeline.effective(given.head)
        task.partial_rollout = PartialRollout(given.partial_rollout, head, given.tokens)
    if given.kind is ReturnKind.INTERRUPTED:
        task.came_back = True
        run.make_pending(task, run.now)
        return ReturnOutcome.PENDING
    return _fail(run, task, given.error)


def _interrupt(run: RunState, task: Task) -> None:
    """The lease ends without a fault of the task; an earlier partial rollout stays."""
    run.count("leases_returned")
    task.came_back = True
    run.make_pending(task, run.now)


def _fail(run: RunState, task: Task, error: str) -> ReturnOutcome:
    """An attempt failed: back off, or fail for good at the attempt cap."""
    task.failures += 1
    run.starts.of(task.environment).failed_attempts += 1
    if task.failures < run.policy.max_attempts:
        task.came_back = True
        run.make_pending(task, run.now + backoff_ms(run.policy, task.failures))
        return ReturnOutcome.PENDING
    run.starts.of(task.environment).failed_tasks += 1
    run.leases.close(task)
    run.move_task(task, TaskState.FAILED)
    task.partial_rollout = None
    run.ended[task.task_id] = task
    run.failures.append(TaskFailure(task.task_id, task.attempt, error, run.now))
    return ReturnOutcome.FAILED


def _reply(run: RunState, tasks: Sequence[Task], wait: LeaseWait | None = None, required_version: int = 0) -> Leased:
    grants = [
        LeaseGrant(
            task.lease_id,
            task.task_id,
            task.incarnation,
            task.attempt,
            task.spec,
            task.partial_rollout.body if task.partial_rollout else b"",
        )
        for task in tasks
    ]
    return Leased(run.settle(), grants, wait, run.published, required_version, run.policy.lease_ttl_ms)
