"""Resume: a trainer takes the run over.

Invariants: a resume raises the term and puts the clock back to the version that belongs to its step; versions that
only the abandoned timeline has count as that one from then on; operators' switches stay.
"""

from dataclasses import replace
from typing import assert_never

from buffer_service.domain.ops import Resume, Resumed, ResumeMode, WeightVersion
from buffer_service.rules.transitions import GroupState
from buffer_wire.errors import ReplayGap, StepAhead
from tests.oracle import reuse
from tests.oracle.records import PublishedAt
from tests.oracle.state import RunState

LOST_SEQUENCES = 100_000_000
"""More numbers than a store can have lost: the ids that the run gives to tasks are counted by them. Whoever still works
on a lost task must not be taken for the worker of a new one.
"""

NOTHING_PUBLISHED = PublishedAt(committed_steps=0, version=0, manifest=b"")


def resume(run: RunState, request: Resume) -> Resumed:
    """A trainer takes the run over at next_step."""
    if run.last_resume is not None and run.last_resume[0] == request.request_id:
        return replace(run.last_resume[1], revision=run.settle())
    next_step = run.committed_steps if request.next_step is None else request.next_step
    if next_step > run.next_step:
        raise StepAhead(next_step, run.next_step)
    regenerate = next_step < run.checkpointed_steps
    if regenerate and not request.allow_regenerate:
        raise ReplayGap(next_step, run.checkpointed_steps)

    if regenerate:
        # The same tasks are to be generated again.
        run.remembered.clear()
        run.forgotten = run.revision
    run.await_nothing()
    run.stale_wait = run.late_wait = (-1, 0)
    run.refused = (1, 1)
    run.decided_at = -1
    _rewind_clock(run, next_step)
    _take_back(run, next_step, ResumeMode.REQUEUE if regenerate else request.mode)
    if regenerate:
        run.regenerates = True
        for kept in reuse.pool(run):
            reuse.leave(run, kept)
        run.regenerates = False
        run.checkpointed_steps = next_step
    run.committed_steps = min(run.committed_steps, next_step)
    run.published_steps = next_step
    _rewind_open_step(run)
    run.world_size = 0
    run.retained_bytes = sum(run.steps[step].bytes for step in range(run.checkpointed_steps, run.committed_steps))
    if run.rolled_back:
        run.revision = max(run.revision, run.seen_revision)
        run.sequence += LOST_SEQUENCES
        run.stage_leases += LOST_SEQUENCES
        run.rolled_back, run.seen_revision = False, 0
    run.changed = True
    reply = Resumed(
        run.settle(), run.term, next_step, run.next_step, run.published.version, run.cursor, run.feeder_state
    )
    run.last_resume = (request.request_id, reply)
    return reply


def _rewind_clock(run: RunState, next_step: int) -> None:
    """A new term starts from the version that belongs to next_step; what came after it never was."""
    run.publishes = [p for p in run.publishes if p.committed_steps <= next_step]
    fork = run.publishes[-1] if run.publishes else NOTHING_PUBLISHED
    run.term += 1
    run.published = WeightVersion(run.term, fork.version)
    run.manifest = fork.manifest
    run.plan = None
    run.totals.trainer = None
    run.totals.snapshots.clear()
    run.timeline.fork(run.term, fork.version)
    run.queue.clamp(fork.version)
    for step in run.steps.values():
        for group in step.groups:
            group.clamp(fork.version)
    for kept in run.kept.values():
        kept.group.clamp(fork.version)
    for task in run.tasks.values():
        task.clamp(fork.version)


def _rewind_open_step(run: RunState) -> None:
    """Steps that take groups still must not ask for versions that the abandoned timeline alone had."""
    for step in run.steps.values():
        if step.missing or step.step == run.next_step:
            least = min(step.form.train_version, run.train_version_of(step.step))
            step.form = replace(step.form, train_version=least)


def _take_back(run: RunState, next_step: int, mode: ResumeMode) -> None:
    """Batches from next_step on are replayed, requeued or discarded; the open step is one of them."""
    again = [step for step in run.steps.values() if step.step >= next_step]
    groups = [group for step in again for group in step.groups]
    if mode is ResumeMode.REPLAY:
        for group in groups:
            if group.state == GroupState.TRAINED:
                run.move_group(group, GroupState.DELIVERED)
        reuse.replay(run, again)
        return
    reuse.take_apart(run, again)
    for step in again:
        del run.steps[step.step]
    run.next_step = next_step
    match mode:
        case ResumeMode.DISCARD:
            for group in groups:
                run.move_group(group, GroupState.DISCARDED)
                run.end_group(group)
        case ResumeMode.REQUEUE:
            for group in groups:
                run.enqueue(group)
            while not run.queue.fits(run.policy):
                run.drop_oldest()
        case _:
            assert_never(mode)
