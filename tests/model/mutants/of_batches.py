"""Defects of micro-batches and steps."""

from collections.abc import Collection, Iterable
from dataclasses import replace

from buffer_service.domain.ops import GroupFacts, Reject, Rejected
from buffer_service.domain.policy import OverflowAction, StaleAction
from buffer_service.domain.steering.decisions import Decision
from buffer_service.rules.transitions import GroupState
from tests.oracle import batches, micro_batches, progress
from tests.oracle.micro_batches import Plan
from tests.oracle.records import Group
from tests.oracle.rules.sharding import shard
from tests.oracle.state import RunState
from tests.oracle.steps import Loads, MicroBatch, Step


def every_row_is_one(facts: GroupFacts) -> int:
    return facts.samples


def in_turn(
    groups: Iterable[tuple[int, int]], world_size: int, *, equal: bool = False, loads: Loads | None = None
) -> list[list[int]]:
    sequences = sorted(sequence for sequence, _ in groups)
    return [sequences[rank::world_size] for rank in range(world_size)]


def never_equal(
    groups: Iterable[tuple[int, int]], world_size: int, *, equal: bool = False, loads: Loads | None = None
) -> list[list[int]]:
    return shard(groups, world_size, loads=loads)


def balanced_alone(
    groups: Iterable[tuple[int, int]], world_size: int, *, equal: bool = False, loads: Loads | None = None
) -> list[list[int]]:
    return shard(groups, world_size, equal=equal)


_reject = batches.reject


def rejected_for_nothing(run: RunState, request: Reject) -> Rejected:
    rejected = _reject(run, request)
    run.steps[request.step].missing = 0
    return rejected


def rejected_twice(run: RunState, request: Reject) -> Rejected:
    step = run.steps.get(request.step)
    again = len(step.rejected.intersection(request.group_ids)) if step and step.step < run.next_step else 0
    if step:
        step.missing += again
    return _reject(run, request)


def rejected_in_part(run: RunState, request: Reject) -> Rejected:
    step = run.steps.get(request.step)
    if step:
        there = {group.group_id for group in step.groups} | step.rejected
        request = replace(request, group_ids=[name for name in request.group_ids if name in there])
    return _reject(run, request)


_commit = progress._commit


def claims_outlive_the_commit(run: RunState, through_step: int) -> None:
    before = {number: step.missing for number, step in run.steps.items()}
    _commit(run, through_step)
    for number, missing in before.items():
        if number in run.steps:
            run.steps[number].missing = missing


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


def nothing_is_awaited(run: RunState, plan: Plan, step: Step | None) -> int:
    return 0


def room_is_no_matter(run: RunState) -> bool:
    return True


def refusals_are_no_matter(run: RunState) -> bool:
    makes_room = run.policy.overflow_action is OverflowAction.DROP_OLDEST
    return makes_room or (run.line.is_empty(run.now) and run.has_room(tokens=1, size_bytes=1))


def no_window(run: RunState) -> int | None:
    return None


_window_end = micro_batches.window_end


def wider_window(run: RunState) -> int | None:
    end = _window_end(run)
    return None if end is None else end + 1


def nothing_has_its_last_chance(run: RunState, plan: Plan) -> int | None:
    return None


_decide = progress.decide


def decided_anew(run: RunState, decision: Decision) -> bool:
    run.decided_at = -1
    return _decide(run, decision)
