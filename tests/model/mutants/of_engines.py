"""Defects of engines, of weights and of totals."""

from buffer_service.domain import ops
from tests.oracle import progress, resuming, totals
from tests.oracle.engines import Engines
from tests.oracle.leases import LeaseBook
from tests.oracle.records import Task
from tests.oracle.state import RunState
from tests.oracle.totals import Totals

_publish = progress.publish


def plans_outlive_publishes(run: RunState, request: ops.Publish) -> ops.Published:
    plan = run.plan
    published = _publish(run, request)
    run.plan = plan
    return published


_rewind_clock = resuming._rewind_clock


def plans_outlive_resumes(run: RunState, next_step: int) -> None:
    plan = run.plan
    _rewind_clock(run, next_step)
    run.plan = plan


_plan_collective = progress.plan_collective


def plans_of_anything(run: RunState, plan: ops.PlanCollective) -> int:
    run.plan, run.changed = plan, True
    return run.settle()


def first_plans_stay(run: RunState, plan: ops.PlanCollective) -> int:
    before = run.plan
    revision = _plan_collective(run, plan)
    run.plan = before or plan
    return revision


_ask = Engines.ask


def places_are_kept(known: Engines, report: ops.EngineReport, limit: int, now: int) -> bool:
    held = known.permits.get(report.engine_id)
    may_load = _ask(known, report, limit, now)
    if held is not None:
        known.permits.setdefault(report.engine_id, held)
    return may_load


_forget_workers = LeaseBook.forget_silent


def silence_of_holders_counts_on(book: LeaseBook, now: int) -> None:
    heard = {worker_id: worker.heard_ms for worker_id, worker in book.workers.items()}
    _forget_workers(book, now)
    for worker_id, worker in book.workers.items():
        worker.heard_ms = heard[worker_id]


def counters_never_begin_anew(run_totals: Totals, before: dict[str, int] | None, counters: dict[str, int]) -> None:
    for name, count in counters.items():
        run_totals.sums[name] += count - (before or {}).get(name, 0)


def each_counter_begins_anew_alone(run_totals: Totals, before: dict[str, int] | None, counters: dict[str, int]) -> None:
    for name, count in counters.items():
        known = (before or {}).get(name, 0)
        run_totals.sums[name] += count - (known if count >= known else 0)


_accept = Totals.accept


def every_lease_has_a_known_beginning(run_totals: Totals, facts: ops.GroupFacts, generation_ms: int | None) -> None:
    _accept(run_totals, facts, generation_ms or 0)


def partial_rollouts_weigh_nothing(task: Task) -> int:
    return len(task.spec)


_amounts = totals._amounts


def turns_are_samples(facts: ops.GroupFacts) -> dict[str, int]:
    return {**_amounts(facts), "turns": facts.samples}


def only_published_counts(run: RunState, made_by: ops.WeightVersion) -> bool:
    return made_by.term == run.term and made_by.version > run.published.version
