"""Batches: evict what is too stale, assemble the next step, repeat a stored one, settle lost groups.

Invariants: steps assemble in order; a stored step returns the same groups to the same rank until it is freed; no group
enters a batch with train_version - head above max_staleness; sharding is stored, and changes only when a resumed
trainer comes with another world size.
"""

from collections.abc import Collection, Sequence

from buffer_service.domain.gate import too_stale
from buffer_service.domain.model.records import Group, Step
from buffer_service.domain.model.state import RunState
from buffer_service.domain.ops import Batch, Pull, ShardGroup, Short
from buffer_service.domain.policy import StaleAction
from buffer_service.domain.sharding import shard
from buffer_service.domain.transitions import GroupState
from buffer_wire.errors import InvalidField, ReplayGap, StepAhead, WorldSizeMismatch


def pull(run: RunState, request: Pull) -> Batch | Short:
    """One try to get a rank's shard of a step."""
    run.require_epoch(request.epoch)
    if run.world_size not in {0, request.world_size}:
        raise WorldSizeMismatch(request.world_size, run.world_size)
    if request.step < run.checkpointed_steps:
        raise ReplayGap(request.step, run.checkpointed_steps)
    if request.step < run.next_step:
        return _replay(run, request)
    if request.step > run.next_step:
        raise StepAhead(request.step, run.next_step)
    run.require_running()
    train_version = run.published.version if request.train_version is None else request.train_version
    if train_version < run.published.version:
        limit = f"at least the published version {run.published.version}"
        raise InvalidField("train_version", train_version, limit)

    _evict(run, train_version)
    if len(run.queue) >= run.policy.batch_groups:
        run.world_size = request.world_size
        return _reply(run, _assemble(run, train_version), request.rank, replayed=False)
    return Short(
        run.settle(),
        request.step,
        len(run.queue),
        run.policy.batch_groups,
        len(run.leases),
        len(run.pending),
        blocked_hint="",
    )


def check_rank(request: Pull) -> None:
    """Refuse what is wrong in itself, before anything is looked at."""
    if not 0 <= request.rank < request.world_size:
        raise InvalidField("rank", request.rank, f"below world_size {request.world_size}")


def report_lost(run: RunState, step: int, group_ids: Collection[str]) -> None:
    """Delivered groups whose payloads are gone leave their step, and their tasks start anew."""
    batch = run.steps.get(step)
    if batch is None:
        return
    lost = [group for group in batch.groups if group.group_id in group_ids and group.state == GroupState.DELIVERED]
    batch.shards = [[group for group in shard if group not in lost] for shard in batch.shards]
    for group in lost:
        del batch.staleness[group.group_id]
        run.move_group(group, GroupState.LOST)
        run.end_group(group)
    run.assembled_now -= len(lost)
    run.settle()


def _replay(run: RunState, request: Pull) -> Batch:
    batch = run.steps[request.step]
    if run.world_size == 0:
        run.world_size = request.world_size
        run.changed = True
    if batch.world_size != run.world_size:
        batch.shards = _shards(batch.groups, run.world_size)
        run.changed = True
    return _reply(run, batch, request.rank, replayed=True)


def _evict(run: RunState, train_version: int) -> None:
    """What is too stale leaves the queue, stalest first, also when no batch results."""
    while (group := run.queue.stalest()) is not None:
        if not too_stale(run.policy, train_version=train_version, head_version=group.head):
            return
        recycle = run.policy.stale_action is StaleAction.RECYCLE and not group.task.leaseless
        run.dequeue(group, GroupState.RECYCLED if recycle else GroupState.DROPPED_STALE)
        run.end_group(group)


def _assemble(run: RunState, train_version: int) -> Step:
    groups: list[Group] = []
    while len(groups) < run.policy.batch_groups and (group := run.queue.oldest()) is not None:
        run.dequeue(group, GroupState.DELIVERED)
        groups.append(group)
    staleness = {group.group_id: max(0, train_version - group.head) for group in groups}
    batch = Step(run.next_step, train_version, _shards(groups, run.world_size), staleness, run.policy.max_staleness)
    run.steps[batch.step] = batch
    run.next_step += 1
    run.assembled_now += len(groups)

    run.count("assembled_groups", len(groups))
    run.count("assembled_groups_spanning_versions", sum(group.facts.spans_versions for group in groups))
    run.count("staleness_sum", sum(staleness.values()))
    run.count("pre_queue_staleness_sum", sum(group.tail - group.head for group in groups))
    run.count("in_queue_staleness_sum", sum(max(0, train_version - group.tail) for group in groups))
    run.statistics["staleness_max"] = max(run.statistics["staleness_max"], *staleness.values())
    return batch


def _shards(groups: Sequence[Group], world_size: int) -> list[list[Group]]:
    by_sequence = {group.sequence: group for group in groups}
    sizes = [(group.sequence, group.facts.tokens) for group in groups]
    return [[by_sequence[sequence] for sequence in sequences] for sequences in shard(sizes, world_size)]


def _reply(run: RunState, batch: Step, rank: int, *, replayed: bool) -> Batch:
    """The batch as one rank sees it; its staleness is that of its assembly."""
    groups, mine = batch.groups, batch.shards[rank]
    return Batch(
        revision=run.settle(),
        step=batch.step,
        train_version=batch.train_version,
        total_groups=len(groups),
        total_samples=sum(group.facts.samples for group in groups),
        total_tokens=sum(group.facts.tokens for group in groups),
        total_loss_tokens=sum(group.facts.loss_tokens for group in groups),
        staleness_sum=sum(batch.staleness.values()),
        staleness_max=max(batch.staleness.values(), default=0),
        shard=[ShardGroup(group.group_id, group.payload_key, group.sequence, group.head, group.tail) for group in mine],
        shard_tokens=sum(group.facts.tokens for group in mine),
        replayed=replayed,
        queued=len(run.queue),
    )
