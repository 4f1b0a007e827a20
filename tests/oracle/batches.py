"""Batches: evict what is too stale, close the next micro-batch, repeat a stored one, settle lost groups.

Invariants: steps and their micro-batches close in order; a stored micro-batch returns the same groups to the same rank
until it is freed; no group that is too stale by the policy's measure enters a micro-batch; how a micro-batch is split
is stored, and changes only when a resumed trainer comes with another world size.
"""

from collections.abc import Collection
from typing import assert_never

from buffer_service.domain.gate import aged_out
from buffer_service.domain.ops import Batch, Pull, ShardGroup, Short
from buffer_service.domain.policy import StaleAction
from buffer_service.rules.transitions import GroupState
from buffer_wire.errors import InvalidField, ReplayGap, RunPaused, StepAhead, WorldSizeMismatch
from tests.oracle import micro_batches
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
    if request.step < run.next_step:
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
    if run.draining and not run.leases and run.line.is_empty(run.now):
        run.settle()
        raise RunPaused(run.run_id, DRAINED)
    return Short(
        run.settle(),
        request.step,
        len(run.queue),
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


def report_lost(run: RunState, term: int, step: int, payload_keys: Collection[str]) -> None:
    """Groups that are not trained yet and whose payloads are gone leave their step, and their tasks start anew."""
    run.require_term(term)
    stored = run.steps.get(step)
    for one in stored.micro_batches if stored else ():
        for group in list(one.groups):
            if group.payload_key in payload_keys and group.state in {GroupState.FORMING, GroupState.DELIVERED}:
                one.remove(group)
                run.move_group(group, GroupState.LOST)
                run.end_group(group)
    run.settle()


def _replay(run: RunState, request: Pull, step: Step) -> Batch:
    if run.world_size == 0:
        run.world_size = request.world_size
        run.changed = True
    stored = step.micro_batches[request.micro_batch]
    if stored.world_size != run.world_size:
        stored.split(run.world_size, equal=step.form.equal)
        run.changed = True
    return _reply(run, request, step, replayed=True)


def _evict(run: RunState, train_version: int) -> None:
    """Evict what is too stale, stalest first, also when no micro-batch results."""
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
    groups = [group for one in so_far for group in one.groups]
    staleness = [versions for one in so_far for versions in one.staleness.values()]
    mine = so_far[-1].shards[request.rank]
    return Batch(
        revision=run.settle(),
        step=step.step,
        micro_batch=request.micro_batch,
        final=step.step < run.next_step and request.micro_batch + 1 == len(step.micro_batches),
        train_version=step.form.train_version,
        total_groups=len(groups),
        total_samples=sum(group.facts.samples for group in groups),
        total_tokens=sum(group.facts.tokens for group in groups),
        total_loss_tokens=sum(group.facts.loss_tokens for group in groups),
        staleness_sum=sum(staleness),
        staleness_max=max(staleness, default=0),
        shard=[ShardGroup(group.group_id, group.payload_key, group.sequence, group.head, group.tail) for group in mine],
        shard_tokens=sum(group.facts.tokens for group in mine),
        replayed=replayed,
        queued=len(run.queue),
    )
