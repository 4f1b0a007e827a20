"""The trainer's progress: commit, publish, checkpoint, resume.

Order of a trainer: pull → train → commit or publish → checkpoint. Invariants:
checkpointed_steps <= committed_steps <= next_step; versions rise within an epoch by publish only; a resume raises the
epoch and puts the clock back to the version that belongs to its step.
"""

from dataclasses import replace

from buffer_service.domain.model.records import PublishedAt
from buffer_service.domain.model.state import STORE_ROLLED_BACK, RunState
from buffer_service.domain.ops import Publish, Published, Resume, Resumed, ResumeMode, WeightVersion
from buffer_service.domain.transitions import GroupState
from buffer_wire.errors import NotCommitted, ReplayGap, StepAhead, VersionConflict

NOTHING_PUBLISHED = PublishedAt(committed_steps=0, version=0, manifest=b"")


def commit(run: RunState, epoch: int, through_step: int) -> tuple[int, int]:
    """Settle the delivered groups of every step up to through_step as trained."""
    run.require_epoch(epoch)
    run.require_store()
    _require_assembled(run, through_step)
    _commit(run, through_step)
    return run.settle(), run.committed_steps


def publish(run: RunState, request: Publish) -> Published:
    """Publish weights and commit; an exact repeat only commits."""
    run.require_epoch(request.epoch)
    run.require_store()
    repeated = request.version == run.published.version and request.manifest == run.manifest
    if not repeated and request.version <= run.published.version:
        raise VersionConflict(request.version, run.published.version)
    if request.commit_through is not None:
        _require_assembled(run, request.commit_through)
        _commit(run, request.commit_through)
    if not repeated:
        run.published = WeightVersion(request.epoch, request.version)
        run.manifest = request.manifest
        run.published_steps = run.committed_steps
        run.publishes = [p for p in run.publishes if p.committed_steps < run.committed_steps]
        run.publishes.append(PublishedAt(run.committed_steps, request.version, request.manifest))
        run.changed = True
    return Published(run.settle(), run.published, run.committed_steps)


def checkpoint(run: RunState, epoch: int, through_step: int) -> tuple[int, int]:
    """Free the replay data and tombstones of every step up to through_step."""
    run.require_epoch(epoch)
    run.require_store()
    if through_step + 1 > run.committed_steps:
        raise NotCommitted(through_step, run.committed_steps)
    _free(run, through_step + 1)
    return run.settle(), run.checkpointed_steps


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

    _rewind_clock(run, next_step)
    _take_back(run, next_step, ResumeMode.REQUEUE if regenerate else request.mode)
    if regenerate:
        run.checkpointed_steps = next_step
        run.assembled_now = next_step * run.policy.batch_groups
    run.committed_steps = min(run.committed_steps, next_step)
    run.published_steps = next_step
    run.world_size = 0
    if run.paused == STORE_ROLLED_BACK:
        run.revision = max(run.revision, run.seen_revision)
        run.seen_revision = 0
    run.paused = ""
    run.check_failure_budget()
    run.changed = True
    reply = Resumed(
        run.settle(), run.epoch, next_step, run.next_step, run.published.version, run.cursor, run.feeder_state
    )
    run.last_resume = (request.request_id, reply)
    return reply


def _require_assembled(run: RunState, through_step: int) -> None:
    if through_step >= run.next_step:
        raise StepAhead(through_step, run.next_step)


def _commit(run: RunState, through_step: int) -> None:
    """Settle steps as trained; what that leaves beyond retention is freed. A repeat does nothing."""
    if through_step < run.committed_steps:
        return
    for step in range(run.committed_steps, through_step + 1):
        for group in run.steps[step].groups:
            run.move_group(group, GroupState.TRAINED)
    run.committed_steps = through_step + 1
    run.changed = True
    beyond_retention = run.committed_steps - run.policy.retained_steps
    if beyond_retention > run.checkpointed_steps:
        _free(run, beyond_retention)


def _free(run: RunState, below: int) -> None:
    """Steps below `below` go with their payloads and tombstones, and so do tombstones that no step keeps."""
    for step in range(run.checkpointed_steps, below):
        for group in run.steps.pop(step).groups:
            run.payloads.trash(group.payload_key)
            del run.tasks[group.task.task_id]
        run.checkpointed_steps = step + 1
        run.changed = True
    for task_id in run.ended:
        del run.tasks[task_id]
        run.changed = True
    run.ended.clear()
    needed = max((p.committed_steps for p in run.publishes if p.committed_steps <= run.checkpointed_steps), default=0)
    run.publishes = [p for p in run.publishes if p.committed_steps >= needed]


def _rewind_clock(run: RunState, next_step: int) -> None:
    """A new epoch starts from the version that belongs to next_step; what came after it never was."""
    run.publishes = [p for p in run.publishes if p.committed_steps <= next_step]
    fork = run.publishes[-1] if run.publishes else NOTHING_PUBLISHED
    run.epoch += 1
    run.published = WeightVersion(run.epoch, fork.version)
    run.manifest = fork.manifest
    run.timeline.fork(run.epoch, fork.version)
    run.queue.clamp(fork.version)
    for step in run.steps.values():
        for group in step.groups:
            group.clamp(fork.version)
    for task in run.tasks.values():
        task.clamp(fork.version)


def _take_back(run: RunState, next_step: int, mode: ResumeMode) -> None:
    """Batches from next_step on are replayed, requeued or discarded."""
    again = [step for step in run.steps.values() if step.step >= next_step]
    groups = [group for step in again for group in step.groups]
    if mode is ResumeMode.REPLAY:
        for group in groups:
            if group.state == GroupState.TRAINED:
                run.move_group(group, GroupState.DELIVERED)
        return
    for step in again:
        del run.steps[step.step]
    run.next_step = next_step
    run.assembled_now -= len(groups)
    if mode is ResumeMode.DISCARD:
        for group in groups:
            run.move_group(group, GroupState.DISCARDED)
            run.end_group(group)
        return
    for group in groups:
        run.enqueue(group)
    while not run.queue.fits(run.policy):
        run.drop_oldest()
