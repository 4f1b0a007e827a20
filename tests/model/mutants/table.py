"""Defects, each of which breaks one rule of the model.

A mutant is a function, or a constant, in place of another, and the mood in whose histories the difference shows.
"""

from dataclasses import dataclass
from typing import Any

from buffer_service.domain.ops import groups
from buffer_service.domain.policy import Order
from tests.model.mutants import of_batches, of_engines, of_groups, of_reuse, of_stages, of_tasks
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
    reuse,
    stages,
    state,
    steps,
    submitting,
    totals,
)
from tests.oracle.engines import Engines
from tests.oracle.leases import LeaseBook
from tests.oracle.line import PushLine
from tests.oracle.pending import PendingTasks
from tests.oracle.queue import GroupQueue
from tests.oracle.records import Group, Payloads, Task
from tests.oracle.rules.order import Mixture
from tests.oracle.rules.stride import Stride
from tests.oracle.rules.timeline import Timeline
from tests.oracle.starts import Starts
from tests.oracle.state import RunState
from tests.oracle.steps import MicroBatch, Step
from tests.oracle.totals import Totals


@dataclass(frozen=True)
class Defect:
    """Defect: what is replaced by what, and the mood of the histories that show it."""

    mood: str
    owner: Any
    name: str
    replacement: Any


MUTANTS: dict[str, Defect] = {
    "every row is a trajectory": Defect("steady", batches, "trajectories", of_batches.every_row_is_one),
    "partial rollouts take no place in a reply": Defect(
        "interrupted", leasing, "_lease_bytes", of_engines.partial_rollouts_weigh_nothing
    ),
    "the newest group is dropped, not the oldest": Defect("steady", RunState, "make_way", of_groups.newest_is_dropped),
    "a lease lives a millisecond too long": Defect("interrupted", LeaseBook, "live", of_tasks.a_millisecond_more),
    "the gate at assembly is open by a version": Defect("steady", batches, "aged_out", of_tasks.gate_a_version_wider),
    "the gate at assembly is open by a thousandth": Defect(
        "measured", batches, "aged_out", of_tasks.gate_a_thousandth_wider
    ),
    "the gate at the lease is open by a version": Defect("troubled", leasing, "too_stale", of_tasks.a_version_more),
    "queued groups take no capacity": Defect(
        "short of everything", leasing, "capacity", of_tasks.queued_are_not_counted
    ),
    "a fraction of a version is a whole one": Defect("steered", leasing, "capacity", of_tasks.fractions_are_rounded_up),
    "what a controller lowered is as stated": Defect("steered", state, "_in_effect", lambda stated, _, __: stated),
    "the last decision for a publish counts": Defect("steered", progress, "decide", of_batches.decided_anew),
    "an engine's lag does not matter": Defect("paced", leasing, "capacity", of_tasks.lag_does_not_matter),
    "an engine's lag is a version less": Defect("paced", leasing, "capacity", of_tasks.lag_is_a_version_less),
    "the newest first wait for weights": Defect("paced", leasing, "capacity", of_tasks.lag_matters_whatever_the_order),
    "the version that is required is the next step's": Defect(
        "paced", leasing, "required_version", of_tasks.required_for_the_next_step
    ),
    "back-off never doubles": Defect("steady", leasing, "backoff_ms", lambda policy, _: policy.retry_backoff_ms),
    "the budget allows one failure more": Defect(
        "short of everything", state, "over_budget", of_tasks.one_failure_more
    ),
    "versions of an abandoned timeline count in full": Defect(
        "interrupted", Timeline, "effective", of_tasks.not_clamped
    ),
    "queued groups are not clamped by a resume": Defect("interrupted", GroupQueue, "clamp", lambda *_: None),
    "partial rollouts are not clamped by a resume": Defect("interrupted", Task, "clamp", lambda *_: None),
    "versions that nobody published are believed": Defect("steady", pushing, "_is_unheard_of", lambda *_: False),
    "plans announce nothing": Defect("rolling", pushing, "_is_unheard_of", of_engines.only_published_counts),
    "whoever claims a revision is believed": Defect("troubled", reference, "prove", lambda _, claimed: claimed),
    "a requeue ignores the caps": Defect("interrupted", GroupQueue, "fits", of_groups.caps_hold_always),
    "ranks are filled in turn": Defect("resumed", steps, "shard", of_batches.in_turn),
    "limits of starts are ignored": Defect("shared", Starts, "may", of_tasks.limits_are_ignored),
    "starts are allowed a millisecond early": Defect(
        "shared", Starts, "wait_ms", of_tasks.starts_are_allowed_a_millisecond_early
    ),
    "a start forgets what was owed": Defect("shared", Starts, "take", of_tasks.a_start_forgets_what_was_owed),
    "a limited environment holds up the others": Defect(
        "shared", PendingTasks, "pick", of_tasks.a_limited_environment_holds_up_the_others
    ),
    "all priorities are equal": Defect("troubled", PendingTasks, "add", of_tasks.all_priorities_are_equal),
    "a task that starts anew keeps its failures": Defect(
        "measured", RunState, "start_anew", of_tasks.failures_are_kept
    ),
    "payloads are never deleted": Defect("interrupted", Payloads, "trash", lambda *_: None),
    # The complete buffer.
    "shares are ignored": Defect("shared", Mixture, "turn", of_groups.nobody_waits_for_turns),
    "a turn costs the same whatever the share": Defect("shared", Stride, "take", of_groups.turns_cost_the_same),
    "who was away claims the turns it missed": Defect("shared", Stride, "_pass", of_groups.absence_is_saved_up),
    "ties between environments go by the dictionary": Defect("shared", Stride, "choose", of_groups.ties_by_dictionary),
    "turns outlive the last share": Defect("shared", Stride, "reset", lambda _: None),
    "turns of groups that are left queued are taken": Defect("blended", Stride, "copy", lambda stride: stride),
    "priorities of environments are ignored": Defect("shared", Mixture, "priority", lambda _, __, own: own),
    "lifo is fifo": Defect("shared", queue, "_comparator", of_groups.order_of(Order.LIFO, Order.FIFO)),
    "priority is fifo": Defect("shared", queue, "_comparator", of_groups.order_of(Order.PRIORITY, Order.FIFO)),
    "stalest first goes by heads": Defect("measured", queue, "_comparator", of_groups.stalest_by_head),
    "the mean counts as the head": Defect("measured", records, "age_milli", of_tasks.mean_is_head),
    "the tail counts as the head": Defect("measured", records, "age_milli", of_tasks.tail_is_head),
    "means of an abandoned timeline count in full": Defect(
        "measured", Timeline, "effective_milli", of_tasks.mean_is_not_clamped
    ),
    "a partial rollout spans a version too many": Defect("spread", leasing, "too_spread", of_tasks.a_version_wider),
    "no lease is cancelled": Defect("outdated", leasing, "_prolong_or_cancel", of_tasks.always_prolonged),
    "lease heads are not clamped by a resume": Defect("outdated", Task, "clamp", of_tasks.lease_heads_stay),
    "leases are given while draining": Defect("operated", leasing, "_refusal", of_tasks.draining_is_ignored),
    "groups with equal rewards pass": Defect("choosy", pushing, "why_filtered", of_groups.equal_rewards_pass),
    "the least mean reward does not pass": Defect(
        "choosy", pushing, "why_filtered", of_groups.bounds_on_rewards_are_open
    ),
    "the acceptance is averaged over more groups": Defect(
        "choosy", pushing, "acceptance_ppm", of_groups.average_is_slower
    ),
    "quotas bound nothing": Defect("rationed", state, "within_quotas", lambda *_: True),
    "a blocked push can be overtaken": Defect("standing in line", PushLine, "admits", of_groups.nobody_stands_in_line),
    "a retry goes to the end of the line": Defect("standing in line", PushLine, "wait", of_groups.back_to_the_end),
    "places in line last a millisecond longer": Defect("standing in line", line, "TICKET_MS", 3_001),
    "a blocked push that was given up is closed": Defect(
        "standing in line", pushing, "_missing", of_groups.what_is_gone_is_closed
    ),
    "what is accepted expires all the same": Defect("direct", Payloads, "claim", lambda *_: None),
    "any length will do": Defect("direct", Payloads, "is_free", of_groups.any_length_will_do),
    "a repeated write takes the payload from its group": Defect("direct", Payloads, "write", of_groups.written_over),
    "a repeated push is another one": Defect("direct", pushing, "_repeated", lambda *_: None),
    "what met a full queue stays": Defect("direct", Payloads, "release", lambda *_: None),
    "blocked pushes are never given up": Defect("standing in line", pushing, "give_up", lambda _: None),
    "blocked pushes last a millisecond longer": Defect("standing in line", pushing, "STAGING_AGE_MS", 600_001),
    "what is forgotten may be accepted again": Defect("resumed", RunState, "forget_task", of_groups.forgotten_at_once),
    "it does not matter when a push was first tried": Defect(
        "resumed", pushing, "_judge_unknown", of_groups.first_tried_just_now
    ),
    "a task more is remembered": Defect("resumed", groups, "REMEMBERED_TASKS", 5),
    "equal shards are not equal": Defect("even", steps, "shard", of_batches.never_equal),
    "enough tokens make no batch": Defect("choosy", micro_batches, "is_ready", of_batches.tokens_never_suffice),
    "tokens never complete a step": Defect(
        "streamed by tokens", Step, "is_full", property(of_batches.only_groups_fill)
    ),
    "forming groups take no lookahead": Defect(
        "streamed by tokens", leasing, "capacity", of_tasks.forming_are_not_counted
    ),
    "a pull may ask for batches that cannot be": Defect(
        "rationed", micro_batches, "most_batch_groups", lambda _, most: most
    ),
    "micro-batches stay as they were split": Defect("streamed", MicroBatch, "split", lambda *_, **__: None),
    "what is rejected is not made up for": Defect("given back", batches, "reject", of_batches.rejected_for_nothing),
    "what is rejected again is made up for twice": Defect("given back", batches, "reject", of_batches.rejected_twice),
    "what a step never had is passed over": Defect("given back", batches, "reject", of_batches.rejected_in_part),
    "what replaces others is balanced alone": Defect("given back", steps, "shard", of_batches.balanced_alone),
    "what a step lacks outlives its commit": Defect(
        "given back", progress, "_commit", of_batches.claims_outlive_the_commit
    ),
    "a group is used once too often": Defect("used again", reuse, "enter", of_reuse.used_once_too_often),
    "what is too old is used again": Defect("used again", reuse, "evict", of_reuse.never_too_old),
    "what was given up is used again": Defect("used again", reuse, "give_up", of_reuse.given_up_uses_come_back),
    "uses that are taken back count": Defect("used again", reuse, "take_back", of_reuse.uses_that_are_taken_back_count),
    "what steps lack is no room": Defect("paced back", leasing, "capacity", of_tasks.what_steps_lack_is_no_room),
    "engines must be fresh enough for the next step": Defect(
        "paced back", RunState, "first_train_version", property(of_tasks.of_the_next_step)
    ),
    "lost groups count as stale": Defect("streamed", MicroBatch, "remove", of_batches.lost_groups_stay_stale),
    "a trainer that was superseded reports what is lost": Defect(
        "resumed", batches, "report_lost", of_batches.lost_whoever_says_so
    ),
    "whatever the step has now is lost": Defect("resumed", batches, "report_lost", of_batches.lost_whichever_payload),
    "groups of steps are not clamped by a resume": Defect(
        "resumed", Group, "clamp", of_batches.only_queued_groups_are_clamped
    ),
    "no batch waits for groups in flight": Defect(
        "waiting", micro_batches, "_awaited_heads", of_batches.nothing_is_awaited
    ),
    "a batch waits for what waits for its room": Defect(
        "waiting", micro_batches, "_leaves_room", of_batches.room_is_no_matter
    ),
    "a batch waits for what was refused": Defect(
        "waiting", micro_batches, "_leaves_room", of_batches.refusals_are_no_matter
    ),
    "no batch waits for what began before": Defect("in order", micro_batches, "window_end", of_batches.no_window),
    "a window is a group too wide": Defect("in order", micro_batches, "window_end", of_batches.wider_window),
    "a feeder's state is kept with tasks alone": Defect(
        "resumed", submitting, "submit", of_tasks.state_goes_with_tasks_alone
    ),
    "the longest does not go first": Defect("in order", submitting, "_in_order", of_tasks.as_submitted),
    "a place is new with every lease": Defect("in order", RunState, "take_place", of_tasks.new_place),
    "old groups do not go first": Defect(
        "waiting", micro_batches, "last_chance", of_batches.nothing_has_its_last_chance
    ),
    "incarnations are unlimited": Defect("measured", batches, "_may_recycle", of_batches.recycled_for_ever),
    "bytes are retained without bound": Defect("choosy", progress, "_beyond_retention", of_batches.bytes_do_not_count),
    "groups count for their task's environment": Defect(
        "shared", Group, "environment", property(of_batches.of_the_task)
    ),
    # Stages.
    "columns of a lost lease are taken": Defect(
        "staged", stages, "_held_under", of_stages.any_lease_of_the_group_will_do
    ),
    "leases of stages never expire": Defect("staged", stages, "expire", lambda *_: None),
    "a stage may fail on a group for ever": Defect("staged", stages, "_fail", of_stages.failures_do_not_count),
    "stages come in any order": Defect("staged", stages, "following", of_stages.stages_come_in_any_order),
    "rewards of a stage are not judged": Defect("staged", stages, "_score", of_stages.rewards_are_not_judged),
    "columns take no room": Defect("staged", stages, "_grow", lambda *_: None),
    "groups stay in stages that are named no more": Defect("staged", stages, "leave_unnamed", lambda *_: None),
    # Coordination of weights.
    "a plan outlives the publish of its version": Defect(
        "rolling", progress, "publish", of_engines.plans_outlive_publishes
    ),
    "a plan outlives a resume": Defect("rolling", resuming, "_rewind_clock", of_engines.plans_outlive_resumes),
    "anyone may plan anything": Defect("rolling", progress, "plan_collective", of_engines.plans_of_anything),
    "the first plan stays": Defect("rolling", progress, "plan_collective", of_engines.first_plans_stay),
    "any number of engines may load at once": Defect("rolling", Engines, "ask", lambda *_: True),
    "permits last a millisecond longer": Defect("rolling", engines, "PERMIT_TTL_MS", 60_001),
    "engines need not wait for their turn": Defect("rolling", Engines, "_before", lambda *_: 0),
    "turns last a millisecond longer": Defect("rolling", engines, "TURN_TTL_MS", 5_001),
    "places are not given back": Defect("rolling", Engines, "ask", of_engines.places_are_kept),
    "engines that are broken need places": Defect(
        "rolling", engines, "_IN_SERVICE", ("ready", "loading", "quarantined")
    ),
    "counters never begin anew": Defect("rolling", Totals, "_grow", of_engines.counters_never_begin_anew),
    "each counter begins anew alone": Defect("rolling", Totals, "_grow", of_engines.each_counter_begins_anew_alone),
    "every lease has a known beginning": Defect(
        "rolling", Totals, "accept", of_engines.every_lease_has_a_known_beginning
    ),
    "turns are samples": Defect("rolling", totals, "_amounts", of_engines.turns_are_samples),
    "engines are never forgotten": Defect("rolling", Engines, "forget_silent", lambda *_: ()),
    "engines are remembered a millisecond longer": Defect("rolling", engines, "FORGOTTEN_MS", 3_600_001),
    "workers are never forgotten": Defect("rolling", LeaseBook, "forget_silent", lambda *_: None),
    "workers are remembered a millisecond longer": Defect("rolling", leases, "FORGOTTEN_MS", 3_600_001),
    "the silence of who held leases counts on": Defect(
        "rolling", LeaseBook, "forget_silent", of_engines.silence_of_holders_counts_on
    ),
}
