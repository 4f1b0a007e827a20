"""Defects of tasks, leases and versions."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from fractions import Fraction
from typing import Any

from buffer_service.domain import ops
from buffer_service.domain.admission import NO_OPEN_STEP, capacity, required_version
from buffer_service.domain.gate import age_milli, aged_out, too_stale
from buffer_service.domain.policy import UNSET, Order, RunPolicy, StalenessMeasure
from buffer_service.rules.transitions import TaskState
from tests.oracle import leasing, submitting
from tests.oracle.leases import LeaseBook
from tests.oracle.pending import PendingTasks
from tests.oracle.records import Task
from tests.oracle.rules.failures import over_budget
from tests.oracle.rules.order import Mixture
from tests.oracle.rules.spread import too_spread
from tests.oracle.rules.stride import Stride
from tests.oracle.rules.timeline import Timeline
from tests.oracle.starts import Starts
from tests.oracle.state import RunState

_live = LeaseBook.live


def a_millisecond_more(book: LeaseBook, lease_id: str, worker_id: str, instance_id: str, now: int) -> Task | None:
    return _live(book, lease_id, worker_id, instance_id, now - 1)


def a_version_more(policy: RunPolicy, *, train_version: int, head_version: int) -> bool:
    return too_stale(policy, train_version=train_version, head_version=head_version + 1)


def a_version_wider(policy: RunPolicy, *, loaded_version: int, head_version: int) -> bool:
    return too_spread(policy, loaded_version=loaded_version, head_version=head_version + 1)


def queued_are_not_counted(policy: RunPolicy, **counts: Any) -> int | None:
    return capacity(policy, **{**counts, "queued": 0})


def forming_are_not_counted(policy: RunPolicy, **counts: Any) -> int | None:
    return capacity(policy, **{**counts, "open_step": NO_OPEN_STEP})


def fractions_are_rounded_up(policy: RunPolicy, **counts: Any) -> int | None:
    return capacity(policy, **{**counts, "lookahead_milli": UNSET})


def lag_does_not_matter(policy: RunPolicy, **counts: Any) -> int | None:
    return capacity(policy, **{**counts, "behind": 0})


def lag_is_a_version_less(policy: RunPolicy, **counts: Any) -> int | None:
    return capacity(policy, **{**counts, "behind": max(0, counts["behind"] - 1)})


def lag_matters_whatever_the_order(policy: RunPolicy, **counts: Any) -> int | None:
    return capacity(replace(policy, order=Order.FIFO), **counts)


def of_the_next_step(run: RunState) -> int:
    return run.train_version


def what_steps_lack_is_no_room(policy: RunPolicy, **counts: Any) -> int | None:
    return capacity(policy, **{**counts, "missing": 0})


def required_for_the_next_step(policy: RunPolicy, **counts: Any) -> int:
    return required_version(policy, **{**counts, "queued": 0, "leased": 0, "open_step": NO_OPEN_STEP})


def one_failure_more(policy: RunPolicy, failed_tasks: int) -> bool:
    return over_budget(policy, failed_tasks - 1)


_add = PendingTasks.add


def all_priorities_are_equal(pending: PendingTasks, task: Task) -> None:
    task.priority = 0
    _add(pending, task)


_start_anew = RunState.start_anew


def failures_are_kept(run: RunState, task: Task) -> None:
    failures = task.failures
    _start_anew(run, task)
    task.failures = failures


def always_prolonged(run: RunState, task: Task) -> ops.LeaseState:
    leasing.prolong(run, task)
    return ops.LeaseState.LIVE


_clamp_task = Task.clamp


_submit = submitting.submit


def state_goes_with_tasks_alone(run: RunState, request: ops.Submit) -> ops.Submitted:
    state = run.feeder_state
    submitted = _submit(run, request)
    if not request.tasks:
        run.feeder_state = state
    return submitted


def as_submitted(run: RunState, named: Iterable[tuple[str, ops.NewTask]]) -> list[tuple[str, ops.NewTask]]:
    return list(named)


_take_place = RunState.take_place


def new_place(run: RunState, task: Task) -> int:
    if task.lease is None and task.state == TaskState.LEASED:
        task.turn = None
    return _take_place(run, task)


def lease_heads_stay(task: Task, version: int) -> None:
    head = task.lease_head
    _clamp_task(task, version)
    task.lease_head = head


_refusal = leasing._refusal


def draining_is_ignored(run: RunState, ask: ops.LeaseAsk) -> tuple[ops.LeaseWait | None, int]:
    refused = _refusal(run, ask)
    return (None, 0) if refused[0] is ops.LeaseWait.DRAINING else refused


def gate_a_version_wider(policy: RunPolicy, *, train_version: int, age_milli: int) -> bool:
    return aged_out(policy, train_version=train_version, age_milli=age_milli + 1_000)


def gate_a_thousandth_wider(policy: RunPolicy, *, train_version: int, age_milli: int) -> bool:
    return aged_out(policy, train_version=train_version, age_milli=age_milli + 1)


def not_clamped(timeline: Timeline, weights: ops.WeightVersion) -> int:
    return weights.version


def mean_is_not_clamped(timeline: Timeline, milli: int, term: int) -> int:
    return milli


def mean_is_head(measure: StalenessMeasure, *, head: int, tail: int, mean_milli: int) -> int:
    return age_milli(measure, head=head, tail=tail, mean_milli=head * 1_000)


def tail_is_head(measure: StalenessMeasure, *, head: int, tail: int, mean_milli: int) -> int:
    return age_milli(measure, head=head, tail=head, mean_milli=mean_milli)


_wait_ms, _take, _pick = Starts.wait_ms, Starts.take, PendingTasks.pick


def limits_are_ignored(starts: Starts, policy: RunPolicy, environment: str, now: int) -> bool:
    return True


def starts_are_allowed_a_millisecond_early(starts: Starts, policy: RunPolicy, environment: str, now: int) -> int:
    return max(0, _wait_ms(starts, policy, environment, now) - 1)


def a_start_forgets_what_was_owed(starts: Starts, policy: RunPolicy, environment: str, now: int) -> None:
    starts.of(environment).owed = Fraction(0)
    _take(starts, policy, environment, now)


def a_limited_environment_holds_up_the_others(
    pending: PendingTasks, now: int, mixture: Mixture, turns: Stride, may: Callable[[str], bool] = lambda _: True
) -> Task | None:
    task = _pick(pending, now, mixture, turns)
    return task if task is not None and may(task.environment) else None
