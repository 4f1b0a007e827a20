"""Every kind of outcome that the machine must meet, so that an agreement means something, and how it is recognised."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from buffer_service.domain import ops
from buffer_service.domain.ops import LeaseState, LeaseWait, PushKind, ResumeMode, ReturnOutcome
from buffer_service.domain.policy import UNSET, Order, RunPolicy, StalenessMeasure
from buffer_service.rules.totals import TOTALS
from buffer_service.rules.transitions import GroupState, TaskState
from buffer_wire.errors import RolloutBufferError
from tests.model.inside import Inside
from tests.model.notation import Entry
from tests.oracle.pushing import written_key

OPERATIONS = (
    "abandon_push",
    "checkpoint",
    "commit",
    "continue_run",
    "create_run",
    "delete_run",
    "drain_run",
    "expire_written",
    "extend",
    "fetch",
    "give_back",
    "lease",
    "lease_groups",
    "pause_run",
    "plan_collective",
    "publish",
    "pull",
    "push",
    "reject",
    "report_engine",
    "report_lost",
    "resume",
    "retry_push",
    "submit",
    "sweep",
    "update_policy",
    "weights",
    "write",
)

_NEVER = {TaskState.CANCELLED}
"""States that no operation leads to: a lease that is cancelled makes its task pending again."""

_NOT_PUSHED = (PushKind.GONE, PushKind.RECORDED, PushKind.EVALUATIONS_FULL)
"""Outcomes that no push to the queue has: of a retry, and of evaluations (test_evaluations_against_store.py)."""

USES = ("drawn", "trained", "given_back", "lost")
"""States of uses that only grow, but for resumes."""

EXPECTED = frozenset(
    {
        *(f"op:{name}" for name in OPERATIONS),
        *(f"push:{kind}" for kind in PushKind if kind not in _NOT_PUSHED),
        *(f"push:invalid:{field}" for field in ("lease_id", "payload", "tokens", "incarnation")),
        "retry_push:queued",
        "retry_push:blocked",
        "retry_push:closed",
        "retry_push:gone",
        "retry_push:filtered",
        "retry_push:refused",
        "retry_push:payload_missing",
        *(f"written:{kind}" for kind in ("queued", "filtered", "duplicate", "blocked", "rejected_full")),
        "written:again",
        "push:unknown_attempt",
        "push:remembered",
        *(f"blocked:by_{why}" for why in ("caps", "quota", "line")),
        "line:lapsed",
        "rejected:by_quota",
        "dropped:for_quota",
        *(f"lease:{wait}" for wait in LeaseWait),
        "lease:granted",
        "lease:repeated",
        "lease:full",
        "lease:too_large_to_continue",
        "lease:fewer_for_its_lag",
        "lease:none_for_its_lag",
        "lease:continued",
        *(f"stage:{what}" for what in ("leased", "repeated")),
        "push:invalid:samples",
        *(f"extend:{state}" for state in LeaseState),
        *(f"give_back:{outcome}" for outcome in ReturnOutcome),
        "submit:repeated",
        "pull:short",
        *(f"micro_batch:{which}" for which in ("whole", "first", "later", "open", "final", "ahead_of_ranks")),
        *(f"micro_batch:{size}" for size in ("fewer_by_tokens", "final_by_tokens", "given_size", "equal_shards")),
        *(f"replayed:{what}" for what in ("stored", "open", "paused", "resharded")),
        *(f"order:{order}" for order in Order),
        *(f"stale_by:{measure}" for measure in StalenessMeasure),
        "shares:batches",
        "shares:leases",
        "publish:new",
        "publish:repeated",
        "plan:new",
        "plan:repeated",
        "lease:behind:granted",
        "lease:behind:none",
        "pull:awaited",
        "decide:kept",
        "decide:late",
        "pull:awaited_by_turn",
        *(f"load:{answer}" for answer in ("granted", "refused", "unlimited", "not_in_service", "over", "not_its_turn")),
        "engine:forgotten",
        "worker:forgotten",
        "worker:kept",
        "steps:freed",
        "released:by_steps",
        "released:by_bytes",
        *(f"resume:{mode}" for mode in ResumeMode),
        *(f"resume:{mode}:open" for mode in ResumeMode),
        "resume:repeated",
        "resume:regenerated",
        "resume:behind",
        *(f"rejected:{what}" for what in ("open", "complete", "again", "nothing")),
        "micro_batch:replaces",
        *(f"reused:{what}" for what in (*USES, "thrice", "open")),
        "error:invalid_field:group_ids[]",
        "error:invalid_field:step",
        *(f"lost:{state}" for state in (GroupState.FORMING, GroupState.DELIVERED)),
        *(f"paused:{why}" for why in ("store_rolled_back", "failure_budget_exceeded", "operator", "released")),
        "run:draining",
        "run:deleted",
        *(f"group:{state}" for state in GroupState),
        *(f"task:{state}" for state in TaskState if state not in _NEVER),
        "statistic:leases_expired",
        "statistic:leases_cancelled",
        "statistic:partial_rollout_tokens_discarded",
        "statistic:partial_rollouts_beyond_spread",
        *(f"statistic:{total}" for total in TOTALS),
        *(f"window:{change}" for change in ("grown", "forgotten")),
        "statistic:assembled_groups_spanning_versions",
        "statistic:filtered_equal_rewards",
        "statistic:filtered_response_tokens",
        "statistic:filtered_mean_reward",
        "error:unknown_run",
        "error:run_exists",
        *(
            f"error:invalid_field:{field}"
            for field in ("tasks[].task_id", "rank", "train_version", "micro_batch", "batch_groups", "world_size")
        ),
        "error:invalid_field:micro_batch of a complete step",
        "error:invalid_field:micro_batch of a new step",
        "error:invalid_field:train_version of a later micro-batch",
        "error:invalid_policy:staleness_measure",
        "error:policy_changed",
        "error:stale_term",
        "error:cursor_conflict",
        "error:pending_full",
        *(f"error:run_paused:{why}" for why in ("store_rolled_back", "operator", "draining", "drained")),
        "error:store_rolled_back",
        "error:unproven_revision",
        "error:failure_budget_exceeded",
        "error:step_ahead",
        "error:replay_gap",
        "error:world_size_mismatch",
        "error:version_conflict",
        "error:not_committed",
    }
)


def missing(seen: Counter[str]) -> list[str]:
    """Outcomes that no history met."""
    return sorted(name for name in EXPECTED if seen[name] == 0)


@dataclass(frozen=True, slots=True)
class Before:
    """State that is looked at before an operation."""

    view: ops.RunView | None
    line: frozenset[str]
    """Payload keys that wait in the line."""
    world_size: int | None
    """Number of ranks for which the micro-batch that is pulled was split; None: it is not there yet."""
    micro_batches: int
    """Closed micro-batches of the step that is pulled, else of the open one."""


def look(inside: Inside, entry: Entry, view: ops.RunView | None) -> Before:
    """Just before the operation."""
    if view is None:
        return Before(None, frozenset(), None, 0)
    step, number = view.next_step, 0
    if entry.operation == "pull":
        step, number = entry.args[0].step, entry.args[0].micro_batch
    return Before(view, inside.line(), inside.world_size_of(step, number), inside.micro_batches_of(step))


def observe(
    seen: Counter[str],
    inside: Inside,
    entry: Entry,
    args: Sequence[Any],
    reply: Any,
    before: Before,
    after: ops.RunView | None,
) -> None:
    """Count what has just happened. `args`: the model's."""
    if isinstance(reply, RolloutBufferError):
        _count_error(seen, reply)
        seen["retry_push:refused"] += entry.operation == "retry_push" and before.view is not None
    if before.view is None or after is None:
        seen["run:deleted"] += before.view is not None
        return
    seen.update(f"reused:{what}" for what in USES if getattr(after.reuse, what) > getattr(before.view.reuse, what))
    match reply:
        case ops.PushResult():
            _count_push(
                seen,
                inside,
                entry,
                [group.facts if isinstance(group, ops.NewGroup) else group[0] for group in args[0]],
                reply,
                after,
            )
        case ops.Leased():
            seen[f"lease:{reply.wait or 'granted'}"] += 1
            behind = reply.wait is LeaseWait.ENGINE_STALE and not inside.is_too_old(entry.args[0].loaded)
            seen[f"lease:{'fewer' if reply.grants else 'none'}_for_its_lag"] += behind
            seen["lease:continued"] += any(grant.partial_rollout for grant in reply.grants)
            _count_sizes(seen, entry.args[0], reply, before.view, after)
            seen["shares:leases"] += bool(reply.grants and after.tasks["pending"] and _shared(after.policy))
        case ops.Extended():
            seen.update(f"extend:{state}" for state in reply.states)
        case ops.Returned():
            seen.update(f"give_back:{outcome}" for outcome in reply.outcomes)
        case ops.Batch():
            _count_batch(seen, entry.args[0], reply, before, after)
        case ops.Rejected():
            which = "open" if reply.step == after.next_step else "complete"
            seen[f"rejected:{which if reply.rejected_groups else 'nothing'}"] += 1
            seen["rejected:again"] += bool(entry.args[0].group_ids) and not reply.rejected_groups
        case ops.Short():
            seen["pull:short"] += 1
            seen["pull:awaited"] += reply.awaited > 0 and not reply.awaited_task
            seen["pull:awaited_by_turn"] += bool(reply.awaited_task)
        case ops.EngineReported():
            seen[f"load:{_answer(entry.args[0], reply, after.policy)}"] += 1
        case ops.Resumed() if reply.term > before.view.term:
            mode = entry.args[0].mode
            seen[f"resume:{mode}"] += before.view.next_step > reply.next_step
            seen[f"resume:{mode}:open"] += before.micro_batches > 0
        case _:
            pass
    _count_line(seen, inside, entry, args, before)
    _count_changes(seen, entry, before.view, after)


def _count_sizes(
    seen: Counter[str], ask: ops.LeaseAsk, reply: ops.Leased, before: ops.RunView, after: ops.RunView
) -> None:
    granted = after.statistics["leases_granted"] > before.statistics["leases_granted"]
    seen["lease:full"] += granted and reply.wait is None and len(reply.grants) < ask.max_tasks
    discarded = (
        after.statistics["partial_rollout_tokens_discarded"] - before.statistics["partial_rollout_tokens_discarded"]
    )
    # Otherwise they may have been too old.
    any_age = after.policy.max_staleness < 0 and after.policy.max_version_spread < 0
    seen["lease:too_large_to_continue"] += granted and any_age and discarded > 0


def _answer(report: ops.EngineReport, reply: ops.EngineReported, policy: RunPolicy) -> str:
    if not report.wants_load:
        return "over"
    if not policy.max_unavailable_engines:
        return "unlimited"
    if report.state not in {"ready", "loading"}:
        return "not_in_service"
    return "granted" if reply.may_load else "refused"


def _count_error(seen: Counter[str], refusal: RolloutBufferError) -> None:
    name = f"error:{refusal.reason}"
    seen[name] += 1
    if detail := refusal.attributes.get("field") or (refusal.reason == "run_paused" and refusal.attributes.get("why")):
        seen[f"{name}:{''.join(c for c in detail if not c.isdigit())}"] += 1
        if detail == "micro_batch":
            seen[f"{name}:{detail} of a {'complete' if 'below' in refusal.attributes['limit'] else 'new'} step"] += 1
        if "first micro-batch" in refusal.attributes.get("limit", ""):
            seen[f"{name}:{detail} of a later micro-batch"] += 1


def _shared(policy: RunPolicy) -> bool:
    return any(rule.share != UNSET for rule in policy.environments)


def _count_push(
    seen: Counter[str],
    inside: Inside,
    entry: Entry,
    facts: Sequence[ops.GroupFacts],
    pushed: ops.PushResult,
    after: ops.RunView,
) -> None:
    for group, outcome in zip(facts, pushed.outcomes, strict=True):
        seen[f"{entry.operation}:{outcome.kind}"] += 1
        seen[f"written:{outcome.kind}"] += group.stored
        if outcome.kind is PushKind.UNKNOWN_LEASE:
            seen["push:unknown_attempt"] += group.task_id in inside.environments()
        if outcome.kind is PushKind.CLOSED:
            seen["push:remembered"] += group.task_id not in inside.environments()
        if outcome.kind is PushKind.INVALID:
            seen[f"push:invalid:{outcome.field}"] += 1
    if not pushed.outcomes:
        return
    # The state after the call is the one that the last group met.
    last, kind = facts[-1], pushed.outcomes[-1].kind
    room, quota = _caps_hold(after, last), _quotas_hold(after, last)
    if kind is PushKind.BLOCKED:
        seen[f"blocked:by_{'caps' if not room else 'line' if quota else 'quota'}"] += 1
    elif kind is PushKind.REJECTED_FULL:
        seen["rejected:by_quota"] += room and not quota
        seen["dropped:for_quota"] += after.policy.overflow_action == "drop_oldest"


def _caps_hold(view: ops.RunView, facts: ops.GroupFacts) -> bool:
    policy, queued = view.policy, view.groups[GroupState.QUEUED]
    return (
        queued.groups < policy.max_queued_groups
        and (not policy.max_queued_tokens or queued.tokens + facts.tokens <= policy.max_queued_tokens)
        and queued.bytes + facts.size_bytes <= policy.max_queued_bytes
    )


def _quotas_hold(view: ops.RunView, facts: ops.GroupFacts) -> bool:
    policy = view.policy
    live = [view.groups[state] for state in (GroupState.QUEUED, GroupState.FORMING, GroupState.DELIVERED)]
    return all(
        not quota or sum(getattr(amount, name) for amount in live) + more <= quota
        for quota, name, more in (
            (policy.quota_groups, "groups", 1),
            (policy.quota_tokens, "tokens", facts.tokens),
            (policy.quota_bytes, "bytes", facts.size_bytes),
        )
    )


def _count_batch(seen: Counter[str], pull: ops.Pull, batch: ops.Batch, before: Before, after: ops.RunView) -> None:
    assert before.view is not None
    if batch.replayed:
        seen["replayed:stored"] += batch.step < before.view.next_step
        seen["replayed:open"] += batch.step == before.view.next_step
        seen["replayed:paused"] += before.view.paused == "operator"
        seen["replayed:resharded"] += before.world_size not in {None, pull.world_size}
        return
    if batch.step < before.view.next_step:
        seen["micro_batch:replaces"] += 1
        return
    policy = before.view.policy
    seen["reused:thrice"] += any(group.prior_uses > 1 for group in batch.shard)
    seen["reused:open"] += batch.reused_groups > 0 and not batch.final
    streamed = batch.micro_batch > 0 or not batch.final or policy.micro_batch_groups > 0
    seen["micro_batch:whole"] += not streamed
    seen["micro_batch:first"] += streamed and batch.micro_batch == 0
    seen["micro_batch:later"] += batch.micro_batch > 0
    seen["micro_batch:open"] += not batch.final
    seen["micro_batch:final"] += streamed and batch.final
    seen["micro_batch:ahead_of_ranks"] += pull.rank > 0
    few = batch.final and batch.total_groups - batch.reused_groups < (pull.batch_groups or policy.batch_groups)
    seen["micro_batch:final_by_tokens" if streamed else "micro_batch:fewer_by_tokens"] += (
        few and policy.batch_tokens > 0
    )
    seen["micro_batch:given_size"] += pull.batch_groups is not None
    seen["micro_batch:equal_shards"] += policy.equal_shards and pull.world_size > 1
    queued = after.groups[GroupState.QUEUED].groups
    seen[f"order:{policy.order}"] += queued > 0
    seen["shares:batches"] += queued > 0 and _shared(policy)


def _count_line(seen: Counter[str], inside: Inside, entry: Entry, args: Sequence[Any], before: Before) -> None:
    """Count who left the line although nobody spoke of it."""
    if before.line and entry.operation in {"push", "retry_push"}:
        own = {key for _, key in args[0]} if entry.operation == "retry_push" else set(map(written_key, args[0]))
        seen["line:lapsed"] += bool(before.line - inside.line() - own)


def _count_changes(seen: Counter[str], entry: Entry, before: ops.RunView, after: ops.RunView) -> None:
    for state, amount in after.groups.items():
        seen[f"group:{state}"] += max(0, amount.groups - before.groups[state].groups)
    for task_state, number in after.tasks.items():
        seen[f"task:{task_state}"] += max(0, number - before.tasks[task_state])
    for name, value in after.statistics.items():
        seen[f"statistic:{name}"] += abs(value - before.statistics[name])
    seen["window:grown"] += before.window is not None and after.window is not None and after.window != before.window
    seen["window:forgotten"] += before.window is not None and after.window is None
    if after.checkpointed_steps > before.checkpointed_steps:
        seen["steps:freed"] += 1
        if entry.operation in {"commit", "publish"}:
            kept = after.committed_steps - after.checkpointed_steps
            seen[f"released:by_{'bytes' if kept < after.policy.retained_steps else 'steps'}"] += 1
    if after.paused != before.paused:
        seen[f"paused:{after.paused or 'released'}"] += 1
    seen["run:draining"] += after.draining and not before.draining
    if entry.operation == "pull":
        gone = (GroupState.DROPPED_STALE, GroupState.RECYCLED)
        more = sum(after.groups[state].groups - before.groups[state].groups for state in gone)
        seen[f"stale_by:{after.policy.staleness_measure}"] += more
    if entry.operation == "report_lost":
        for state in (GroupState.FORMING, GroupState.DELIVERED):
            seen[f"lost:{state}"] += before.groups[state].groups - after.groups[state].groups
