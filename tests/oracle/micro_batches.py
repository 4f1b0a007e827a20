"""Micro-batches: what the next one needs, which groups it takes, and closing it.

A whole batch is one micro-batch that closes its step. A streamed step closes when it has all its groups or tokens;
until then its groups are forming. Invariants: turns between environments are taken only by groups that enter a
micro-batch; a step's form is that of its first micro-batch.
"""

from dataclasses import dataclass
from typing import assert_never

from buffer_service.domain.gate import MILLI
from buffer_service.domain.liveness import most_batch_groups
from buffer_service.domain.ops import TAKEN_AT_ONCE, Pull
from buffer_service.domain.policy import OverflowAction, RunPolicy, StaleAction
from buffer_service.domain.timeline import next_train_version
from buffer_service.rules.transitions import GroupState
from buffer_wire.errors import InvalidField
from tests.oracle import reuse
from tests.oracle.records import Group
from tests.oracle.state import RunState
from tests.oracle.steps import Form, MicroBatch, Step, split

MAX_BATCH_GROUPS = 65_536


@dataclass(frozen=True, slots=True)
class Plan:
    """The next micro-batch of a step: its form, how many groups it needs, and the fewest that make one."""

    form: Form
    needed: int
    minimum: int
    replaces: bool = False
    """It makes up for rejected groups of a complete step."""


def plan(run: RunState, request: Pull, step: Step | None) -> Plan:
    """Return what the micro-batch that is asked for needs; `step` is the open one, if there is one. Raises
    InvalidField.
    """
    form = _first_form(run, request) if step is None else step.form
    if step is not None and step.missing:
        return _replacement(run, request, step)
    if step is not None and request.train_version not in {None, form.train_version}:
        limit = f"{form.train_version}, that of the step's first micro-batch"
        raise InvalidField("train_version", request.train_version, limit)
    world_size, groups = request.world_size, form.target
    if form.equal and groups % world_size and (form.streamed or form.token_budget == 0):
        raise InvalidField("world_size", world_size, f"a divisor of batch_groups {groups} (equal_shards)")
    if not form.streamed:
        if form.equal and groups < world_size:
            raise InvalidField("world_size", world_size, f"at most batch_groups {groups} (equal_shards)")
        return Plan(form, groups, world_size if form.equal else 1)
    size = min(world_size * form.micro_groups, groups - (len(step.groups) if step else 0))
    if size > run.policy.max_queued_groups:
        ranks = run.policy.max_queued_groups // form.micro_groups
        limit = (
            f"at most {ranks} ranks: a micro-batch of world_size * micro_batch_groups groups must fit max_queued_groups"
        )
        raise InvalidField("world_size", world_size, limit)
    return Plan(form, size, size)


def _replacement(run: RunState, request: Pull, step: Step) -> Plan:
    form = step.form
    if request.train_version not in {None, form.train_version}:
        limit = f"{form.train_version}, that of the step's first micro-batch"
        raise InvalidField("train_version", request.train_version, limit)
    size = min(step.missing, TAKEN_AT_ONCE, run.policy.max_queued_groups)
    if form.streamed:
        size = min(size, request.world_size * form.micro_groups)
    return Plan(form, size, size, replaces=True)


def is_ready(run: RunState, micro_batch_plan: Plan) -> bool:
    """Tell whether enough is queued; of a streamed step's micro-batch the fewest that make it are all it needs."""
    form, queue = micro_batch_plan.form, run.queue
    enough_tokens = 0 < form.token_budget <= queue.ready_tokens and not micro_batch_plan.replaces
    return queue.ready >= micro_batch_plan.minimum and (queue.ready >= micro_batch_plan.needed or enough_tokens)


def wanted(run: RunState, micro_batch_plan: Plan) -> int:
    """Return how many queued groups a pull waits for; with enough tokens, for a group for each rank."""
    form, queue = micro_batch_plan.form, run.queue
    enough_tokens = not form.streamed and 0 < form.token_budget <= queue.ready_tokens
    if micro_batch_plan.replaces or not (queue.ready >= micro_batch_plan.needed or enough_tokens):
        return micro_batch_plan.needed
    return 1 if form.streamed else micro_batch_plan.minimum


def last_chance(run: RunState, micro_batch_plan: Plan) -> int | None:
    """Return the version below which a group is too stale for the batch after this one; None where nobody waits."""
    form = micro_batch_plan.form
    if run.policy.stale_action is not StaleAction.WAIT:
        return None
    steps = run.unpublished_steps + (not micro_batch_plan.replaces)
    following = next_train_version(run.published.version, steps, run.policy.batches_per_publish)
    return max(form.train_version, following) - run.policy.max_staleness


def window_end(run: RunState) -> int | None:
    """Return the sequence from which on groups began too long after one in flight; None where there is no window."""
    turns = [task.turn for task in run.leases.tasks.values() if task.holds_window and task.turn is not None]
    return min(turns) + run.policy.order_window_groups if turns else None


def awaited(run: RunState, micro_batch_plan: Plan, step: Step | None) -> tuple[int, str]:
    """Count the leased tasks for which a micro-batch waits, once enough is queued for it; which began first, if it
    waits by their turns.
    """
    if not is_ready(run, micro_batch_plan):
        return 0, ""
    first = ""
    count = len(before := _awaited_turns(run, micro_batch_plan))
    if before:
        first = before[min(before)]
    else:
        count = _awaited_heads(run, micro_batch_plan, step)
    if count and not _leaves_room(run):
        return 0, ""
    number = step.step if step else run.next_step
    since = run.late_wait if micro_batch_plan.replaces else run.stale_wait
    if count and since[0] != number:
        since = (number, run.now)
    if micro_batch_plan.replaces:
        run.late_wait = since
    else:
        run.stale_wait = since
        if count:
            run.awaited = (count, first, run.now)
    return (count, first) if count and run.now - since[1] < run.policy.stale_wait_ms else (0, "")


def _leaves_room(run: RunState) -> bool:
    """Tell whether a group that ends finds room, or makes it: else it waits for the batch that would wait for it."""
    match run.policy.overflow_action:
        case OverflowAction.DROP_OLDEST:
            return True
        case OverflowAction.BLOCK | OverflowAction.REJECT:
            return run.line.is_empty(run.now) and run.has_room(*run.refused)
        case _ as action:
            assert_never(action)


def _awaited_turns(run: RunState, micro_batch_plan: Plan) -> dict[int, str]:
    """Leased tasks by turn, those that hold up the first group beyond the window, if too few are within."""
    end = window_end(run)
    if end is None:
        return {}
    beyond = [group.sequence for group in run.queue if group.sequence >= end]
    if len(run.queue) - len(beyond) >= micro_batch_plan.needed:
        return {}
    last = min(beyond) - run.policy.order_window_groups
    leased = run.leases.tasks.values()
    return {task.turn: task.task_id for task in leased if task.holds_window and task.turn and task.turn <= last}


def _awaited_heads(run: RunState, micro_batch_plan: Plan, step: Step | None) -> int:
    """Count the leased tasks that have their last chance with the last micro-batch of a step."""
    form, groups = micro_batch_plan.form, len(step.groups) if step else 0
    below = last_chance(run, micro_batch_plan)
    is_last = not form.streamed or groups + micro_batch_plan.needed >= form.target
    if below is None or not is_last or micro_batch_plan.replaces:
        return 0
    last = form.train_version - run.policy.max_staleness
    heads = [task.awaited for task in run.leases.tasks.values() if task.awaited is not None]
    return sum(last <= head < below for head in heads)


def close(run: RunState, world_size: int, micro_batch_plan: Plan, step: Step | None) -> Step:
    """Close the next micro-batch; the step is the given one, or a new one."""
    form = micro_batch_plan.form
    groups = _take(run, micro_batch_plan, world_size)
    run.refused = (1, 1)
    if step is None:
        step = run.steps[run.next_step] = Step(run.next_step, form)
        reuse.draw(run, step, world_size)
    replaces = micro_batch_plan.replaces or step.uneven
    beside = replaces or (not step.micro_batches and step.reused is not None)
    loads = step.loads(len(step.micro_batches), world_size) if beside else None
    closed = _measured(run, form, groups, split(groups, world_size, equal=form.equal, loads=loads))
    closed.replaces = replaces
    step.micro_batches.append(closed)
    forming = form.streamed and not micro_batch_plan.replaces
    for group in groups:
        run.move_group(group, GroupState.FORMING if forming else GroupState.DELIVERED)
    if micro_batch_plan.replaces:
        step.missing -= len(groups)
    elif step.is_full:
        for group in step.groups:
            if group.state == GroupState.FORMING:
                run.move_group(group, GroupState.DELIVERED)
        run.next_step += 1
    _count(run, form, groups, closed)
    return step


def _first_form(run: RunState, request: Pull) -> Form:
    policy = run.policy
    train_version = run.published.version if request.train_version is None else request.train_version
    if train_version < run.published.version:
        limit = f"at least the published version {run.published.version}"
        raise InvalidField("train_version", train_version, limit)
    if request.batch_groups is None:
        return _form(policy, train_version, policy.batch_groups)
    held = MAX_BATCH_GROUPS if policy.micro_batch_groups else min(MAX_BATCH_GROUPS, policy.max_queued_groups)
    most = most_batch_groups(policy, held)
    if not 1 <= request.batch_groups <= most:
        raise InvalidField("batch_groups", request.batch_groups, f"1 to {most}")
    return _form(policy, train_version, request.batch_groups)


def _form(policy: RunPolicy, train_version: int, groups: int) -> Form:
    return Form(train_version, groups, policy.micro_batch_groups, policy.batch_tokens, policy.equal_shards)


def _take(run: RunState, micro_batch_plan: Plan, world_size: int) -> list[Group]:
    """The groups of the micro-batch, out of the queue, in order of their picks."""
    form, policy = micro_batch_plan.form, run.policy
    budget = 0 if form.streamed or micro_batch_plan.replaces else form.token_budget
    turns = run.queue_turns.copy()
    picked: list[Group] = []
    tokens = 0
    # What is beyond the window is taken only after a wait in vain.
    end = None if _awaited_turns(run, micro_batch_plan) else window_end(run)
    below = last_chance(run, micro_batch_plan)
    while below is not None and len(picked) < micro_batch_plan.needed:
        stalest = run.queue.stalest(policy.staleness_measure)
        if stalest is None or stalest.head >= below:
            break
        run.queue.remove(stalest)
        picked.append(stalest)
    hurried = len(picked)
    while len(picked) < micro_batch_plan.needed:
        group = run.queue.pick(run.mixture, policy.staleness_measure, turns, end)
        if group is None:
            break
        tokens += group.facts.tokens
        if 0 < budget < tokens and len(picked) >= micro_batch_plan.minimum:
            break
        run.queue.remove(group)
        run.take_turn(turns, group.environment)
        picked.append(group)
    whole = form.equal and not form.streamed and not micro_batch_plan.replaces
    kept = len(picked) - len(picked) % world_size if whole else len(picked)
    for group in picked[hurried:kept]:
        run.take_turn(run.queue_turns, group.environment)
    for group in picked[kept:]:
        run.queue.add(group)
    return picked[:kept]


def _measured(run: RunState, form: Form, groups: list[Group], shards: list[list[Group]]) -> MicroBatch:
    youngest = form.train_version * MILLI
    return MicroBatch(
        shards=shards,
        staleness={group.group_id: max(0, form.train_version - group.head) for group in groups},
        stalest_milli=max(youngest - group.age_milli(run.policy.staleness_measure) for group in groups),
        max_staleness=run.policy.max_staleness,
    )


def _count(run: RunState, form: Form, groups: list[Group], closed: MicroBatch) -> None:
    for group in groups:
        run.totals.assemble(group, form.train_version)
    run.count("assembled_groups_spanning_versions", sum(group.facts.spans_versions for group in groups))
    run.statistics["staleness_max"] = max(run.statistics["staleness_max"], *closed.staleness.values())
