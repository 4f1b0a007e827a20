"""The trainer's progress: commit, plan, publish, checkpoint.

Order of a trainer: pull → train → commit or publish → checkpoint. Invariants:
checkpointed_steps <= committed_steps <= next_step; versions rise within a term by publish only; what a commit leaves
retained is within the policy's bounds.
"""

from buffer_service.domain.ops import PlanCollective, Publish, Published, WeightVersion
from buffer_service.domain.steering.decisions import NO_DECISION, Decision
from buffer_service.rules.transitions import GroupState
from buffer_wire.errors import NotCommitted, StepAhead, VersionConflict
from buffer_wire.revision import Revision
from tests.oracle import reuse
from tests.oracle.records import PublishedAt
from tests.oracle.state import RunState


def commit(run: RunState, term: int, through_step: int) -> tuple[Revision, int]:
    """Settle the delivered groups of every step up to through_step as trained."""
    run.require_term(term)
    run.require_store()
    _require_assembled(run, through_step)
    _commit(run, through_step)
    return run.settle(), run.committed_steps


def publish(run: RunState, request: Publish) -> Published:
    """Publish weights and commit; an exact repeat only commits."""
    run.require_term(request.term)
    run.require_store()
    repeated = request.version == run.published.version and request.manifest == run.manifest
    if not repeated and request.version <= run.published.version:
        raise VersionConflict(request.version, run.published.version)
    if request.commit_through is not None:
        _require_assembled(run, request.commit_through)
        _commit(run, request.commit_through)
    if request.clock is not None:
        run.totals.trainer_says(request.clock)
    if not repeated:
        if run.plan is not None and run.plan.version <= request.version:
            run.plan = None
        run.published = WeightVersion(request.term, request.version)
        run.manifest = request.manifest
        run.published_steps = run.committed_steps
        if request.commit_through is None:
            # Weights without a word on what they include: everything but the batches that may be prefetched.
            run.published_steps = max(run.committed_steps, run.next_step - run.policy.prefetch_batches)
        run.publishes = [p for p in run.publishes if p.committed_steps < run.committed_steps]
        run.publishes.append(PublishedAt(run.committed_steps, request.version, request.manifest))
        run.totals.publish(run.now, request.version)
        run.changed = True
    return Published(run.settle(), run.published, run.committed_steps)


def decide(run: RunState, decision: Decision) -> bool:
    """Keep a controller's decision, unless one was made for the published version or another is published."""
    late = decision.version != run.published.version or run.decided_at >= decision.version
    if late or not run.stated.target_staleness_milli:
        return False
    run.changed = run.decision == NO_DECISION or run.decision.knobs != decision.knobs
    run.decision, run.decided_at = decision, decision.version
    run.settle()
    return True


def plan_collective(run: RunState, plan: PlanCollective) -> Revision:
    """Announce weights to come, in place of those announced before."""
    run.require_term(plan.term)
    run.require_store()
    if plan.version <= run.published.version:
        raise VersionConflict(plan.version, run.published.version)
    if run.plan != plan:
        run.plan = plan
        run.changed = True
    return run.settle()


def checkpoint(run: RunState, term: int, through_step: int) -> tuple[Revision, int]:
    """Free the replay data and tombstones of every step up to through_step."""
    run.require_term(term)
    run.require_store()
    if through_step + 1 > run.committed_steps:
        raise NotCommitted(through_step, run.committed_steps)
    _free(run, through_step + 1)
    return run.settle(), run.checkpointed_steps


def _require_assembled(run: RunState, through_step: int) -> None:
    if through_step >= run.next_step:
        raise StepAhead(through_step, run.next_step)


def _commit(run: RunState, through_step: int) -> None:
    """Settle steps as trained; what that leaves beyond retention is freed. A repeat does nothing."""
    if through_step < run.committed_steps:
        return
    for step in range(run.committed_steps, through_step + 1):
        run.steps[step].missing = 0
        for group in run.steps[step].groups:
            run.move_group(group, GroupState.TRAINED)
        reuse.move(run, "delivered", "trained", len(run.steps[step].reused_again))
        run.retained_bytes += run.steps[step].bytes
    first, run.committed_steps = run.committed_steps, through_step + 1
    for step in range(first, run.committed_steps):
        reuse.keep(run, run.steps[step])
    run.changed = True
    beyond_retention = _beyond_retention(run)
    if beyond_retention > run.checkpointed_steps:
        _free(run, beyond_retention)


def _beyond_retention(run: RunState) -> int:
    """The first step that the bounds on steps and on bytes both let retain."""
    first, retained = run.checkpointed_steps, run.retained_bytes
    while first < run.committed_steps and 0 < run.policy.max_retained_bytes < retained:
        retained -= run.steps[first].bytes
        first += 1
    return max(first, run.committed_steps - run.policy.retained_steps)


def _free(run: RunState, below: int) -> None:
    """Steps below `below` go, and so do tombstones that no step keeps."""
    if below > run.checkpointed_steps:
        _free_steps(run, below)
    for task_id in run.ended:
        run.forget_task(task_id)
    run.ended.clear()


def _free_steps(run: RunState, below: int) -> None:
    """Their payloads, tombstones, and publishes that no resume can go back to."""
    for step in range(run.checkpointed_steps, below):
        freed = run.steps.pop(step)
        run.retained_bytes -= freed.bytes
        for group in (*freed.groups, *freed.reused_again):
            run.release_group(group, step)
        run.checkpointed_steps = step + 1
    run.changed = True
    needed = max((p.committed_steps for p in run.publishes if p.committed_steps <= run.checkpointed_steps), default=0)
    run.publishes = [p for p in run.publishes if p.committed_steps >= needed]
