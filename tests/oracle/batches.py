"""Batches: evict what is too stale, close the next micro-batch, repeat a stored one, settle lost and rejected groups.

Invariants: steps and their micro-batches close in order; a stored micro-batch returns the same groups to the same rank
until it is freed; no group that is too stale by the policy's measure enters a micro-batch; how a micro-batch is split
is stored, and changes only when a resumed trainer comes with another world size.
"""

from collections.abc import Collection
from typing import assert_never

from buffer_service.domain.gate import aged_out
from buffer_service.domain.ops import AddedColumns, Batch, GroupFacts, Pull, Reject, Rejected, ShardGroup, Short
from buffer_service.domain.policy import StaleAction
from buffer_service.rules.transitions import GroupState
from buffer_wire.errors import InvalidField, ReplayGap, RunPaused, StepAhead, WorldSizeMismatch
from tests.oracle import micro_batches, reuse
from tests.oracle.records import Group
from tests.oracle.state import RunState
from tests.oracle.steps import Step

DRAINED = "drained"


def pull(run: RunState, request: Pull) -> Batch | Short:
    """One try to get a rank's shard of a micro-batch of a step."""
    run.require_term(request.term)
    if run.world_size not in {0, request.world_size}:
        raise WorldSizeMismatch(request.world_size, run.world_size)
    if request.step < run.checkpointed_steps:
        raise ReplayGap(request.step, run.checkpointed_steps)
    if request.step > run.next_step:
        raise StepAhead(request.step, run.next_step)
    step = run.steps.get(request.step)
    closed = len(step.micro_batches) if step else 0
    if step is not None and request.micro_batch < closed:
        return _replay(run, request, step)
    if request.step < run.next_step and not (step and step.missing):
        raise InvalidField(
            "micro_batch", request.micro_batch, f"below {closed}, the micro-batches of step {request.step}"
        )
    if request.micro_batch > closed:
        raise InvalidField(
            "micro_batch", request.micro_batch, f"at most {closed}, the next micro-batch of step {request.step}"
        )
    run.require_running()

    plan = micro_batches.plan(run, request, step)
    _evict(run, plan.form.train_version)
    awaited, awaited_task = micro_batches.awaited(run, plan, step)
    if not awaited and micro_batches.is_ready(run, plan):
        run.world_size = request.world_size
        return _reply(run, request, micro_batches.close(run, request.world_size, plan, step), replayed=False)
    nothing_in_stages = run.queue.ready == len(run.queue)
    if run.draining and not run.leases and nothing_in_stages and run.line.is_empty(run.now):
        run.settle()
        raise RunPaused(run.run_id, DRAINED)
    needed = micro_batches.wanted(run, plan)
    run.needed = min(needed, run.missing) if run.missing else needed
    return Short(
        run.settle(),
        request.step,
        run.queue.ready,
        plan.needed,
        len(run.leases),
        len(run.pending),
        blocked_hint="",
        awaited=awaited,
        awaited_task=awaited_task,
    )


def check_rank(request: Pull) -> None:
    """Refuse what is wrong in itself, before anything is looked at."""
    if not 0 <= request.rank < request.world_size:
        raise InvalidField("rank", request.rank, f"below world_size {request.world_size}")


def reject(run: RunState, request: Reject) -> Rejected:
    """Groups of a step that is not committed are given back; a complete one is to get as many others."""
    run.require_term(request.term)
    run.require_store()
    step = run.steps.get(request.step)
    if step is None and request.step >= run.next_step:
        raise StepAhead(request.step, run.next_step)
    if step is None or request.step < run.committed_steps:
        raise InvalidField("step", request.step, f"at least {run.committed_steps}, the first that is not committed")
    there = {group.group_id: group for group in (*step.groups, *step.reused_again)}
    for index, name in enumerate(request.group_ids):
        if name not in there and name not in step.rejected:
            raise InvalidField(f"group_ids[{index}]", name, f"a group of step {request.step}")
    gone = [there[name] for name in dict.fromkeys(request.group_ids) if name in there]
    again = step.reused_again
    step.uneven |= bool(gone)
    for group in gone:
        step.rejected.add(group.group_id)
        if group in again:
            reuse.give_up(run, step, group, "given_back")
            continue
        for one in step.micro_batches:
            if group.group_id in one.staleness:
                one.remove(group)
        run.move_group(group, GroupState.REJECTED)
        run.end_group(group)
    if step.step < run.next_step:
        step.missing += len([group for group in gone if group not in again])
    missing = step.missing if step.step < run.next_step else step.form.target - len(step.groups)
    last = len(step.micro_batches) - 1
    facts = _reply(run, Pull(request.term, step.step, 0, 1, None, last), step, replayed=True)
    return Rejected(
        facts.revision,
        len(gone),
        missing,
        step.step,
        last,
        facts.final,
        facts.train_version,
        facts.total_groups,
        facts.total_samples,
        facts.total_tokens,
        facts.total_loss_tokens,
        facts.total_trajectories,
        facts.reused_groups,
        facts.staleness_sum,
        facts.staleness_max,
    )


def report_lost(run: RunState, term: int, step: int, payload_keys: Collection[str]) -> None:
    """Groups that are not trained yet and whose payloads are gone leave their step, and their tasks start anew."""
    run.require_term(term)
    stored = run.steps.get(step)
    for one in stored.micro_batches if stored else ():
        for group in list(one.groups):
            is_lost = any(key in payload_keys for key in group.payload_keys)
            if stored and is_lost and group.state in {GroupState.FORMING, GroupState.DELIVERED}:
                one.remove(group)
                stored.uneven = True
                run.move_group(group, GroupState.LOST)
                run.end_group(group)
    if stored is not None and stored.step >= run.committed_steps:
        for group in stored.reused_again:
            if any(key in payload_keys for key in group.payload_keys):
                reuse.give_up(run, stored, group, "lost")
                stored.uneven = True
    run.settle()


def _replay(run: RunState, request: Pull, step: Step) -> Batch:
    if run.world_size == 0:
        run.world_size = request.world_size
        run.changed = True
    stored = step.micro_batches[request.micro_batch]
    if stored.world_size != run.world_size:
        step.split_again(request.micro_batch, run.world_size)
        run.changed = True
    return _reply(run, request, step, replayed=True)


def _evict(run: RunState, train_version: int) -> None:
    """Evict what is too stale, stalest first, also when no micro-batch results."""
    reuse.evict(run, train_version)
    measure = run.policy.staleness_measure
    while (group := run.queue.stalest(measure)) is not None:
        if not aged_out(run.policy, train_version=train_version, age_milli=group.age_milli(measure)):
            return
        run.dequeue(group, GroupState.RECYCLED if _may_recycle(run, group) else GroupState.DROPPED_STALE)
        run.end_group(group)


def _may_recycle(run: RunState, group: Group) -> bool:
    """Tell whether the group's task is generated once more."""
    incarnations = run.policy.max_incarnations
    exhausted = 0 < incarnations <= group.task.incarnation + 1
    action = run.policy.stale_action
    match action:
        case StaleAction.RECYCLE | StaleAction.WAIT:
            return not group.task.leaseless and not exhausted
        case StaleAction.DROP:
            return False
        case _:
            assert_never(action)


def _reply(run: RunState, request: Pull, step: Step, *, replayed: bool) -> Batch:
    """The micro-batch as one rank sees it, with the staleness of its closing and the step's totals so far."""
    so_far = step.micro_batches[: request.micro_batch + 1]
    with_reused = [*([step.reused] if step.reused else []), *so_far]
    groups = [group for one in with_reused for group in one.groups]
    staleness = [versions for one in with_reused for versions in one.staleness.values()]
    mine = so_far[-1].shards[request.rank]
    again = step.reused.shards[request.rank] if step.reused and request.micro_batch == 0 else []
    return Batch(
        revision=run.settle(),
        step=step.step,
        micro_batch=request.micro_batch,
        final=step.step < run.next_step and request.micro_batch + 1 == len(step.micro_batches) and not step.missing,
        train_version=step.form.train_version,
        total_groups=len(groups),
        total_samples=sum(group.facts.samples for group in groups),
        total_tokens=sum(group.facts.tokens for group in groups),
        total_loss_tokens=sum(group.facts.loss_tokens for group in groups),
        total_trajectories=sum(trajectories(group.facts) for group in groups),
        reused_groups=len(step.reused_again),
        staleness_sum=sum(staleness),
        staleness_max=max(staleness, default=0),
        shard=[*map(_in_shard, mine), *(_in_shard(group, step.prior_uses[group.group_id]) for group in again)],
        shard_tokens=sum(group.facts.tokens for group in (*mine, *again)),
        replayed=replayed,
        queued=run.queue.ready,
    )


def trajectories(facts: GroupFacts) -> int:
    """Trajectories that are trained on; unless it is said, each sample is one."""
    return facts.trajectories or facts.samples


def _in_shard(group: Group, prior_uses: int = 0) -> ShardGroup:
    added = [AddedColumns(stage, key) for stage, key in group.added]
    return ShardGroup(group.group_id, group.payload_key, group.sequence, group.head, group.tail, added, prior_uses)
