"""Stages: groups that wait for what others add, the leases of these, and what becomes of groups meanwhile.

Invariants: a queued group is in at most one stage, the first of the policy that has not added anything to it when it
got there; it is held at most once; what a stage adds is taken once, from whoever holds the group.
"""

import re
from collections.abc import Collection
from dataclasses import replace

from buffer_service.domain.ops import (
    AddedColumns,
    GroupFacts,
    LeaseReturn,
    Pushed,
    PushKind,
    ReturnKind,
    ReturnOutcome,
    StageAsk,
    StageLease,
    StageLeased,
    StageState,
)
from buffer_service.domain.policy import REWARDS
from buffer_service.rules.transitions import GroupState
from tests.oracle.queue import ranked
from tests.oracle.records import Group, Hold, StageNote
from tests.oracle.rules.filters import acceptance_ppm, has_filter, why_filtered
from tests.oracle.rules.identity import group_id
from tests.oracle.state import RunState

EXPIRIES_PER_LEASE = 100
REMEMBERED_WORKERS = 256

_LEASE = re.compile(r"([^/]+)/(0|[1-9]\d{0,14})/([a-z0-9_]+):([1-9]\d{0,14})", re.ASCII)


def lease(run: RunState, ask: StageAsk) -> StageLeased:
    """Lease groups that wait in a stage; a repeat gets what is live of its leases."""
    expire(run, EXPIRIES_PER_LEASE)
    if ask.stage not in run.policy.stages:
        return _leased(run, ask.stage, [])
    run.stage_notes.setdefault(ask.stage, StageNote()).asked = run.now
    worker = ask.stage, ask.worker_id
    instance, request_id, granted = run.stage_workers.get(worker, ("", "", []))
    if instance != ask.instance_id:
        for group in held(run):
            hold = group.hold
            if hold and group.stage == ask.stage and hold.worker_id == ask.worker_id:
                _go_back(run, group)
        _forget_workers(run)
        run.stage_workers[worker] = ask.instance_id, "", []
    elif request_id == ask.request_id:
        kept = [
            group for group, hold in granted if group.hold is hold and group in run.queue and hold.expiry >= run.now
        ]
        return _leased(run, ask.stage, kept)
    if run.paused:
        return _leased(run, ask.stage, [])
    rank = ranked(run.mixture, run.policy.staleness_measure)
    waiting = [group for group in run.queue if group.stage == ask.stage and group.hold is None]
    picked = sorted(waiting, key=rank)[: ask.max_groups]
    for group in picked:
        run.stage_leases += 1
        expiry = run.now + run.policy.lease_ttl_ms
        group.hold = Hold(run.stage_leases, ask.worker_id, ask.instance_id, run.now, expiry)
        run.changed = True
    if picked:
        run.stage_workers[worker] = ask.instance_id, ask.request_id, [(one, one.hold) for one in picked if one.hold]
    return _leased(run, ask.stage, picked)


def _forget_workers(run: RunState) -> None:
    """Forget workers that hold nothing, once they are many."""
    if len(run.stage_workers) >= REMEMBERED_WORKERS:
        holding = {(group.stage, group.hold.worker_id) for group in held(run) if group.hold}
        run.stage_workers = {worker: known for worker, known in run.stage_workers.items() if worker in holding}


def extend(run: RunState, worker_id: str, instance_id: str, lease_id: str) -> bool:
    """Prolong a lease; whether it is live."""
    group = _live(run, worker_id, instance_id, lease_id)
    if group is None or group.hold is None:
        return False
    group.hold.expiry = run.now + run.policy.lease_ttl_ms
    run.changed = True
    return True


def take_back(run: RunState, worker_id: str, instance_id: str, given: LeaseReturn) -> ReturnOutcome:
    """A worker hands a lease back."""
    group = _live(run, worker_id, instance_id, given.lease_id)
    if group is None:
        return ReturnOutcome.LOST
    if given.kind is ReturnKind.FAILED:
        return ReturnOutcome.FAILED if _fail(run, group) else ReturnOutcome.PENDING
    _go_back(run, group)
    return ReturnOutcome.PENDING


def expire(run: RunState, most: int) -> None:
    """Leases that are past their expiry end, the earliest first."""
    due = sorted(
        (group.hold.expiry, group.sequence, group) for group in held(run) if group.hold and group.hold.expiry < run.now
    )
    for _, _, group in due[:most]:
        _fail(run, group)


def repeated(run: RunState, facts: GroupFacts, payload_key: str) -> Pushed | None:
    """Answer a push of the very columns that were taken before like the first one."""
    named = _parsed(facts)
    task = run.tasks.get(facts.task_id)
    if named is None or task is None or task.incarnation != facts.incarnation:
        return None
    if task.added.get(named[0]) != (named[1], payload_key):
        return None
    return _pushed(facts, PushKind.FILTERED if task.filtered else PushKind.ADDED)


def take(run: RunState, facts: GroupFacts, payload_key: str, missing: PushKind | None) -> Pushed:
    """Take what was made for a group, if its lease is held."""
    refused = _refused(run, facts)
    if refused is not None:
        return refused
    group = _held_under(run, facts.lease_id)
    if group is None or group.hold is None:
        return _pushed(facts, PushKind.CLOSED)
    for field in ("samples", "tokens"):
        mine, its = getattr(facts, field), getattr(group.facts, field)
        if mine != its:
            return _invalid(facts, field, mine, f"{its}, those of the group")
    return _pushed(facts, missing or _add(run, group, group.hold, facts, payload_key))


def _refused(run: RunState, facts: GroupFacts) -> Pushed | None:
    """Say what is wrong with the lease itself, or that it has had its result."""
    match = _LEASE.fullmatch(facts.lease_id)
    if match is None or int(match[4]) > run.stage_leases:
        return _pushed(facts, PushKind.UNKNOWN_LEASE)
    named = _parsed(facts)
    if named is None:
        limit = "task_id/incarnation/stage:number of this group"
        return _invalid(facts, "lease_id", facts.lease_id, limit)
    stage, number = named
    task = run.tasks.get(facts.task_id)
    if task is not None and task.incarnation == facts.incarnation and task.added.get(stage, (0, ""))[0] == number:
        return _pushed(facts, PushKind.DUPLICATE)
    return None


def _add(run: RunState, group: Group, hold: Hold, facts: GroupFacts, payload_key: str) -> PushKind:
    """The group has it now, and goes on, or meets the filter by rewards."""
    stage = group.stage
    group.task.added[stage] = hold.number, payload_key
    note = run.stage_notes.setdefault(stage, StageNote())
    note.added, note.busy_ms = note.added + 1, note.busy_ms + run.now - hold.granted
    note.added_bytes += facts.size_bytes
    run.changed = True
    if stage == REWARDS and (why := _score(run, group, facts)):
        group.task.filtered = True
        run.count(why)
        _end(run, group, GroupState.FILTERED)
        return PushKind.FILTERED
    group.added.append((stage, payload_key))
    _advance(run, group)
    _grow(run, group, facts)
    return PushKind.ADDED


def _grow(run: RunState, group: Group, facts: GroupFacts) -> None:
    """The group has the bytes of its columns too, whatever the caps say."""
    run.grow(group, facts.size_bytes)
    if facts.stored:
        run.count("written_bytes", facts.size_bytes)


def leave_unnamed(run: RunState) -> None:
    """Groups of stages that the policy does not name any more go on."""
    for group in [group for group in run.queue if group.stage and group.stage not in run.policy.stages]:
        run.stage_notes.setdefault(group.stage, StageNote()).passed_over += 1
        _advance(run, group)


def following(run: RunState, group: Group) -> str:
    """The first stage that has not added anything to a group; empty for none."""
    done = {name for name, _ in group.added}
    return next((name for name in run.policy.stages if name not in done), "")


def states(run: RunState, now: int) -> list[StageState]:
    """See RunView."""
    groups = [group for group in run.queue if group.stage]
    others = {group.stage for group in groups} | {name for name, note in run.stage_notes.items() if note.passed_over}
    names = [*run.policy.stages, *sorted(others - {*run.policy.stages})]
    found = []
    for name in names:
        note = run.stage_notes.get(name, StageNote())
        leased = sum(group.hold is not None for group in groups if group.stage == name)
        waiting = sum(group.stage == name for group in groups) - leased
        asked = None if note.asked is None else now - note.asked
        found.append(
            StageState(
                name, waiting, leased, note.added, note.failed, note.busy_ms, asked, note.passed_over, note.added_bytes
            )
        )
    return found


def held(run: RunState) -> Collection[Group]:
    """Groups that workers of stages hold."""
    return [group for group in run.queue if group.hold is not None]


def _leased(run: RunState, stage: str, groups: list[Group]) -> StageLeased:
    leases = [
        StageLease(
            f"{group.group_id}/{stage}:{group.hold.number}",
            group.group_id,
            group.payload_key,
            [AddedColumns(name, key) for name, key in group.added],
            group.sequence,
            group.head,
            group.tail,
        )
        for group in groups
        if group.hold
    ]
    waiting = sum(group.stage == stage and group.hold is None for group in run.queue)
    return StageLeased(run.settle(), leases, run.policy.lease_ttl_ms, waiting, run.published, run.paused)


def _score(run: RunState, group: Group, facts: GroupFacts) -> str | None:
    """The rewards of a stage take the place of the group's; the filter that they meet."""
    run.totals.reward(facts.reward_milli - group.facts.reward_milli)
    group.facts = replace(group.facts, reward_milli=facts.reward_milli)
    why = why_filtered(run.policy, facts, judge="rewards")
    if has_filter(run.policy):
        before = run.statistics["recent_acceptance_ppm"]
        run.statistics["recent_acceptance_ppm"] = acceptance_ppm(before, passed=why is None)
    return why


def _advance(run: RunState, group: Group) -> None:
    _place(run, group, following(run, group))
    group.tries = 0


def _go_back(run: RunState, group: Group) -> None:
    _place(run, group, group.stage)


def _place(run: RunState, group: Group, stage: str) -> None:
    run.queue.remove(group)
    group.stage, group.hold = stage, None
    run.queue.add(group)
    run.changed = True


def _fail(run: RunState, group: Group) -> bool:
    """A lease has failed; whether it was the last one that the stage may have."""
    group.tries += 1
    run.stage_notes.setdefault(group.stage, StageNote()).failed += 1
    if group.tries >= run.policy.max_attempts:
        _end(run, group, GroupState.DISCARDED)
        return True
    _go_back(run, group)
    return False


def _end(run: RunState, group: Group, state: GroupState) -> None:
    run.dequeue(group, state)
    run.end_group(group)


def _live(run: RunState, worker_id: str, instance_id: str, lease_id: str) -> Group | None:
    group = _held_under(run, lease_id)
    hold = group.hold if group else None
    if hold is None or hold.expiry < run.now or (hold.worker_id, hold.instance_id) != (worker_id, instance_id):
        return None
    return group


def _held_under(run: RunState, lease_id: str) -> Group | None:
    return next(
        (one for one in held(run) if one.hold and f"{one.group_id}/{one.stage}:{one.hold.number}" == lease_id), None
    )


def _parsed(facts: GroupFacts) -> tuple[str, int] | None:
    """Stage and number of the lease, where that is of this group."""
    match = _LEASE.fullmatch(facts.lease_id)
    if match is None or (match[1], int(match[2])) != (facts.task_id, facts.incarnation):
        return None
    return match[3], int(match[4])


def _pushed(facts: GroupFacts, kind: PushKind) -> Pushed:
    return Pushed(kind, group_id(facts.task_id, facts.incarnation))


def _invalid(facts: GroupFacts, field: str, value: object, limit: str) -> Pushed:
    return Pushed(PushKind.INVALID, group_id(facts.task_id, facts.incarnation), "", field, str(value), limit)
