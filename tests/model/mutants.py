"""Defects, each of which breaks one rule of the model.

A mutant is a function, or a constant, in place of another, and the mood in whose histories the difference shows.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from buffer_service.domain import ops
from buffer_service.domain.admission import NO_OPEN_STEP, capacity, required_version
from buffer_service.domain.gate import age_milli, aged_out, too_stale
from buffer_service.domain.ops import groups
from buffer_service.domain.policy import Order, RunPolicy, StaleAction, StalenessMeasure
from buffer_service.rules.transitions import GroupState
from tests.oracle import (
    batches,
    engines,
    leases,
    leasing,
    line,
    micro_batches,
    progress,
    pushing,
    queue,
    records,
    reference,
    resuming,
    state,
    steps,
    totals,
)
from tests.oracle.engines import Engines
from tests.oracle.leases import LeaseBook
from tests.oracle.line import PushLine
from tests.oracle.micro_batches import Plan
from tests.oracle.pending import PendingTasks
from tests.oracle.queue import GroupQueue
from tests.oracle.records import Group, Payloads, Task
from tests.oracle.rules.failures import over_budget
from tests.oracle.rules.filters import acceptance_ppm, why_filtered
from tests.oracle.rules.order import Mixture
from tests.oracle.rules.sharding import shard
from tests.oracle.rules.spread import too_spread
from tests.oracle.rules.stride import Stride
from tests.oracle.rules.timeline import Timeline
from tests.oracle.state import RunState
from tests.oracle.steps import Form, MicroBatch, Step
from tests.oracle.totals import Totals


@dataclass(frozen=True)
class Defect:
    """Defect: what is replaced by what, and the mood of the histories that show it."""

    mood: str
    owner: Any
    name: str
    replacement: Any


# ── leases and tasks ──

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


def lag_does_not_matter(policy: RunPolicy, **counts: Any) -> int | None:
    return capacity(policy, **{**counts, "behind": 0})


def lag_is_a_version_less(policy: RunPolicy, **counts: Any) -> int | None:
    return capacity(policy, **{**counts, "behind": max(0, counts["behind"] - 1)})


def lag_matters_whatever_the_order(policy: RunPolicy, **counts: Any) -> int | None:
    return capacity(replace(policy, order=Order.FIFO), **counts)


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


def lease_heads_stay(task: Task, version: int) -> None:
    head = task.lease_head
    _clamp_task(task, version)
    task.lease_head = head


_refusal = leasing._refusal


def draining_is_ignored(run: RunState, ask: ops.LeaseAsk) -> tuple[ops.LeaseWait | None, int]:
    refused = _refusal(run, ask)
    return (None, 0) if refused[0] is ops.LeaseWait.DRAINING else refused


def nothing_is_awaited(run: RunState, plan: Plan, step: Step | None) -> int:
    return 0


def nothing_has_its_last_chance(run: RunState, form: Form) -> int | None:
    return None


# ── versions ──


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


# ── queue and turns ──


def newest_is_dropped(run: RunState) -> None:
    group = max(run.queue, key=lambda group: group.sequence)
    run.dequeue(group, GroupState.DROPPED_OVERFLOW)
    run.end_group(group)


_fits = GroupQueue.fits


def caps_hold_always(queue: GroupQueue, policy: RunPolicy, facts: ops.GroupFacts | None = None) -> bool:
    return facts is None or _fits(queue, policy, facts)


_comparator = queue._comparator


def order_of(instead: Order, actual: Order) -> Callable[..., Any]:
    """One order sorts as another does."""

    def comparator(mixture: Mixture, measure: StalenessMeasure) -> Any:
        return _comparator(replace(mixture, order=actual) if mixture.order is instead else mixture, measure)

    return comparator


def stalest_by_head(mixture: Mixture, measure: StalenessMeasure) -> Any:
    return _comparator(mixture, StalenessMeasure.HEAD)


def nobody_waits_for_turns(mixture: Mixture, environments: Iterable[str], stride: Stride) -> str | None:
    return None


_take = Stride.take


def turns_cost_the_same(stride: Stride, environment: str, share: int) -> None:
    _take(stride, environment, 1)


def absence_is_saved_up(stride: Stride, environment: str) -> int:
    return stride.passes.get(environment, 0)


def ties_by_dictionary(stride: Stride, environments: Iterable[str]) -> str | None:
    return min(environments, key=lambda name: (stride._pass(name), name.casefold()), default=None)


# ── pushes ──


def equal_rewards_pass(policy: RunPolicy, facts: ops.GroupFacts) -> str | None:
    return why_filtered(replace(policy, filter_equal_rewards=False), facts)


def bounds_on_rewards_are_open(policy: RunPolicy, facts: ops.GroupFacts) -> str | None:
    return why_filtered(policy, replace(facts, mean_reward_milli=facts.mean_reward_milli - 1))


def average_is_slower(before: int, *, passed: bool) -> int:
    return (before + acceptance_ppm(before, passed=passed)) // 2


def nobody_stands_in_line(line: PushLine, payload_key: str, now: int) -> bool:
    return True


_wait = PushLine.wait


def back_to_the_end(line: PushLine, payload_key: str, now: int) -> bool:
    known = any(key == payload_key for key, _ in line)
    line.leave(payload_key)
    _wait(line, payload_key, now)
    return not known


_missing = pushing._missing


def what_is_gone_is_closed(run: RunState, facts: ops.GroupFacts, payload_key: str, *, retry: bool) -> Any:
    return ops.PushKind.CLOSED if _missing(run, facts, payload_key, retry=retry) else None


def any_length_will_do(payloads: Payloads, key: str, size: int) -> bool:
    return key in payloads.expiring


_write = Payloads.write


def written_over(payloads: Payloads, key: str, body: ops.Buffer) -> None:
    payloads.trash(key)
    _write(payloads, key, body)


def forgotten_at_once(run: RunState, task_id: str) -> None:
    del run.tasks[task_id]
    run.changed = True


_judge_unknown = pushing._judge_unknown


def first_tried_just_now(run: RunState, facts: ops.GroupFacts) -> ops.Pushed | None:
    return _judge_unknown(run, replace(facts, first_revision=0))


# ── micro-batches ──


def in_turn(groups: Iterable[tuple[int, int]], world_size: int, *, equal: bool = False) -> list[list[int]]:
    sequences = sorted(sequence for sequence, _ in groups)
    return [sequences[rank::world_size] for rank in range(world_size)]


def never_equal(groups: Iterable[tuple[int, int]], world_size: int, *, equal: bool = False) -> list[list[int]]:
    return shard(groups, world_size)


def tokens_never_suffice(run: RunState, micro_batch_plan: Plan) -> bool:
    return len(run.queue) >= max(micro_batch_plan.minimum, micro_batch_plan.needed)


def only_groups_fill(step: Step) -> bool:
    return not step.form.streamed or len(step.groups) >= step.form.target


_remove = MicroBatch.remove


def lost_groups_stay_stale(closed: MicroBatch, group: Group) -> None:
    stale = closed.staleness[group.group_id]
    _remove(closed, group)
    closed.staleness[group.group_id] = stale


_clamp_group = Group.clamp


def only_queued_groups_are_clamped(group: Group, version: int) -> None:
    if group.state == GroupState.QUEUED:
        _clamp_group(group, version)


_report_lost = batches.report_lost


def lost_whoever_says_so(run: RunState, term: int, step: int, payload_keys: Collection[str]) -> None:
    _report_lost(run, run.term, step, payload_keys)


def lost_whichever_payload(run: RunState, term: int, step: int, payload_keys: Collection[str]) -> None:
    groups = run.steps[step].groups if step in run.steps else ()
    _report_lost(run, term, step, {group.payload_key for group in groups} if payload_keys else ())


def recycled_for_ever(run: RunState, group: Group) -> bool:
    return run.policy.stale_action is StaleAction.RECYCLE and not group.task.leaseless


def bytes_do_not_count(run: RunState) -> int:
    return max(run.checkpointed_steps, run.committed_steps - run.policy.retained_steps)


def of_the_task(group: Group) -> str:
    return group.task.environment


# ── weights and engines ──

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


# ── totals ──


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


MUTANTS: dict[str, Defect] = {
    "partial rollouts take no place in a reply": Defect(
        "interrupted", leasing, "_lease_bytes", partial_rollouts_weigh_nothing
    ),
    "the newest group is dropped, not the oldest": Defect("steady", RunState, "drop_oldest", newest_is_dropped),
    "a lease lives a millisecond too long": Defect("interrupted", LeaseBook, "live", a_millisecond_more),
    "the gate at assembly is open by a version": Defect("steady", batches, "aged_out", gate_a_version_wider),
    "the gate at assembly is open by a thousandth": Defect("measured", batches, "aged_out", gate_a_thousandth_wider),
    "the gate at the lease is open by a version": Defect("troubled", leasing, "too_stale", a_version_more),
    "queued groups take no capacity": Defect("short of everything", leasing, "capacity", queued_are_not_counted),
    "an engine's lag does not matter": Defect("paced", leasing, "capacity", lag_does_not_matter),
    "an engine's lag is a version less": Defect("paced", leasing, "capacity", lag_is_a_version_less),
    "the newest first wait for weights": Defect("paced", leasing, "capacity", lag_matters_whatever_the_order),
    "the version that is required is the next step's": Defect(
        "paced", leasing, "required_version", required_for_the_next_step
    ),
    "back-off never doubles": Defect("steady", leasing, "backoff_ms", lambda policy, _: policy.retry_backoff_ms),
    "the budget allows one failure more": Defect("short of everything", state, "over_budget", one_failure_more),
    "versions of an abandoned timeline count in full": Defect("interrupted", Timeline, "effective", not_clamped),
    "queued groups are not clamped by a resume": Defect("interrupted", GroupQueue, "clamp", lambda *_: None),
    "partial rollouts are not clamped by a resume": Defect("interrupted", Task, "clamp", lambda *_: None),
    "versions that nobody published are believed": Defect("steady", pushing, "_is_unheard_of", lambda *_: False),
    "plans announce nothing": Defect("rolling", pushing, "_is_unheard_of", only_published_counts),
    "whoever claims a revision is believed": Defect("troubled", reference, "prove", lambda _, claimed: claimed),
    "a requeue ignores the caps": Defect("interrupted", GroupQueue, "fits", caps_hold_always),
    "ranks are filled in turn": Defect("resumed", steps, "shard", in_turn),
    "all priorities are equal": Defect("troubled", PendingTasks, "add", all_priorities_are_equal),
    "a task that starts anew keeps its failures": Defect("measured", RunState, "start_anew", failures_are_kept),
    "payloads are never deleted": Defect("interrupted", Payloads, "trash", lambda *_: None),
    # The complete buffer.
    "shares are ignored": Defect("shared", Mixture, "turn", nobody_waits_for_turns),
    "a turn costs the same whatever the share": Defect("shared", Stride, "take", turns_cost_the_same),
    "who was away claims the turns it missed": Defect("shared", Stride, "_pass", absence_is_saved_up),
    "ties between environments go by the dictionary": Defect("shared", Stride, "choose", ties_by_dictionary),
    "turns outlive the last share": Defect("shared", Stride, "reset", lambda _: None),
    "turns of groups that are left queued are taken": Defect("blended", Stride, "copy", lambda stride: stride),
    "priorities of environments are ignored": Defect("shared", Mixture, "priority", lambda _, __, own: own),
    "lifo is fifo": Defect("shared", queue, "_comparator", order_of(Order.LIFO, Order.FIFO)),
    "priority is fifo": Defect("shared", queue, "_comparator", order_of(Order.PRIORITY, Order.FIFO)),
    "stalest first goes by heads": Defect("measured", queue, "_comparator", stalest_by_head),
    "the mean counts as the head": Defect("measured", records, "age_milli", mean_is_head),
    "the tail counts as the head": Defect("measured", records, "age_milli", tail_is_head),
    "means of an abandoned timeline count in full": Defect(
        "measured", Timeline, "effective_milli", mean_is_not_clamped
    ),
    "a partial rollout spans a version too many": Defect("spread", leasing, "too_spread", a_version_wider),
    "no lease is cancelled": Defect("outdated", leasing, "_prolong_or_cancel", always_prolonged),
    "lease heads are not clamped by a resume": Defect("outdated", Task, "clamp", lease_heads_stay),
    "leases are given while draining": Defect("operated", leasing, "_refusal", draining_is_ignored),
    "groups with equal rewards pass": Defect("choosy", pushing, "why_filtered", equal_rewards_pass),
    "the least mean reward does not pass": Defect("choosy", pushing, "why_filtered", bounds_on_rewards_are_open),
    "the acceptance is averaged over more groups": Defect("choosy", pushing, "acceptance_ppm", average_is_slower),
    "quotas bound nothing": Defect("rationed", state, "within_quotas", lambda *_: True),
    "a blocked push can be overtaken": Defect("standing in line", PushLine, "admits", nobody_stands_in_line),
    "a retry goes to the end of the line": Defect("standing in line", PushLine, "wait", back_to_the_end),
    "places in line last a millisecond longer": Defect("standing in line", line, "TICKET_MS", 3_001),
    "a blocked push that was given up is closed": Defect(
        "standing in line", pushing, "_missing", what_is_gone_is_closed
    ),
    "what is accepted expires all the same": Defect("direct", Payloads, "claim", lambda *_: None),
    "any length will do": Defect("direct", Payloads, "is_free", any_length_will_do),
    "a repeated write takes the payload from its group": Defect("direct", Payloads, "write", written_over),
    "a repeated push is another one": Defect("direct", pushing, "_repeated", lambda *_: None),
    "what met a full queue stays": Defect("direct", Payloads, "release", lambda *_: None),
    "blocked pushes are never given up": Defect("standing in line", pushing, "give_up", lambda _: None),
    "blocked pushes last a millisecond longer": Defect("standing in line", pushing, "STAGING_AGE_MS", 600_001),
    "what is forgotten may be accepted again": Defect("resumed", RunState, "forget_task", forgotten_at_once),
    "it does not matter when a push was first tried": Defect(
        "resumed", pushing, "_judge_unknown", first_tried_just_now
    ),
    "a task more is remembered": Defect("resumed", groups, "REMEMBERED_TASKS", 5),
    "equal shards are not equal": Defect("even", steps, "shard", never_equal),
    "enough tokens make no batch": Defect("choosy", micro_batches, "is_ready", tokens_never_suffice),
    "tokens never complete a step": Defect("streamed", Step, "is_full", property(only_groups_fill)),
    "forming groups take no lookahead": Defect("streamed by tokens", leasing, "capacity", forming_are_not_counted),
    "a pull may ask for batches that cannot be": Defect(
        "rationed", micro_batches, "most_batch_groups", lambda _, most: most
    ),
    "micro-batches stay as they were split": Defect("streamed", MicroBatch, "split", lambda *_, **__: None),
    "lost groups count as stale": Defect("streamed", MicroBatch, "remove", lost_groups_stay_stale),
    "a trainer that was superseded reports what is lost": Defect(
        "resumed", batches, "report_lost", lost_whoever_says_so
    ),
    "whatever the step has now is lost": Defect("resumed", batches, "report_lost", lost_whichever_payload),
    "groups of steps are not clamped by a resume": Defect("resumed", Group, "clamp", only_queued_groups_are_clamped),
    "no batch waits for groups in flight": Defect("waiting", micro_batches, "awaited", nothing_is_awaited),
    "old groups do not go first": Defect("waiting", micro_batches, "last_chance", nothing_has_its_last_chance),
    "incarnations are unlimited": Defect("measured", batches, "_may_recycle", recycled_for_ever),
    "bytes are retained without bound": Defect("choosy", progress, "_beyond_retention", bytes_do_not_count),
    "groups count for their task's environment": Defect("shared", Group, "environment", property(of_the_task)),
    # Coordination of weights.
    "a plan outlives the publish of its version": Defect("rolling", progress, "publish", plans_outlive_publishes),
    "a plan outlives a resume": Defect("rolling", resuming, "_rewind_clock", plans_outlive_resumes),
    "anyone may plan anything": Defect("rolling", progress, "plan_collective", plans_of_anything),
    "the first plan stays": Defect("rolling", progress, "plan_collective", first_plans_stay),
    "any number of engines may load at once": Defect("rolling", Engines, "ask", lambda *_: True),
    "permits last a millisecond longer": Defect("rolling", engines, "PERMIT_TTL_MS", 60_001),
    "engines need not wait for their turn": Defect("rolling", Engines, "_before", lambda *_: 0),
    "turns last a millisecond longer": Defect("rolling", engines, "TURN_TTL_MS", 5_001),
    "places are not given back": Defect("rolling", Engines, "ask", places_are_kept),
    "engines that are broken need places": Defect(
        "rolling", engines, "_IN_SERVICE", ("ready", "loading", "quarantined")
    ),
    "counters never begin anew": Defect("rolling", Totals, "_grow", counters_never_begin_anew),
    "each counter begins anew alone": Defect("rolling", Totals, "_grow", each_counter_begins_anew_alone),
    "every lease has a known beginning": Defect("rolling", Totals, "accept", every_lease_has_a_known_beginning),
    "turns are samples": Defect("rolling", totals, "_amounts", turns_are_samples),
    "engines are never forgotten": Defect("rolling", Engines, "forget_silent", lambda *_: ()),
    "engines are remembered a millisecond longer": Defect("rolling", engines, "FORGOTTEN_MS", 3_600_001),
    "workers are never forgotten": Defect("rolling", LeaseBook, "forget_silent", lambda *_: None),
    "workers are remembered a millisecond longer": Defect("rolling", leases, "FORGOTTEN_MS", 3_600_001),
    "the silence of who held leases counts on": Defect(
        "rolling", LeaseBook, "forget_silent", silence_of_holders_counts_on
    ),
}
