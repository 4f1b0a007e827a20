"""The canonical dump of a run: what both the model and a store must agree on after every operation."""

from buffer_service.domain.ops import AWAITED_MS, Amount, RunView
from buffer_service.rules.transitions import TaskState
from buffer_wire.limits import MAX_BLOBS_BYTES
from tests.oracle import reuse, stages
from tests.oracle.rules.ledger import add
from tests.oracle.state import LIVE, RunState


def view(run: RunState, now: int) -> RunView:
    """The whole state at `now` (ms).

    What is queued, forming, delivered, pending and leased is counted from what exists.
    """
    awaited, awaited_task = _awaited(run, now)
    return RunView(
        run_id=run.run_id,
        policy=run.stated,
        decision=run.decision,
        revision=run.revision,
        created_ms=run.created_ms,
        term=run.term,
        published=run.published,
        next_step=run.next_step,
        committed_steps=run.committed_steps,
        published_steps=run.published_steps,
        checkpointed_steps=run.checkpointed_steps,
        world_size=run.world_size,
        missing_groups=run.missing,
        reuse=reuse.ledger(run),
        cursor=run.cursor,
        paused=run.paused,
        draining=run.draining,
        groups={**run.group_ledger.entries(), **existing_groups(run)},
        environments={name: ledger.entries() for name, ledger in run.environment_ledgers.items()},
        tasks={**run.task_ledger.entries(), TaskState.PENDING: len(run.pending), TaskState.LEASED: len(run.leases)},
        statistics={**run.statistics, **run.totals.sums},
        engines=run.engines.view(now),
        failures=list(reversed(run.failures)),
        window=run.totals.window,
        response_lengths=run.totals.response_lengths,
        staleness_counts=run.totals.staleness_counts,
        reload_counters=tuple(run.totals.reloads),
        awaited=awaited,
        awaited_task=awaited_task,
        stages=stages.states(run, now),
        environment_work=run.starts.view(run.policy, now),
        environment_statistics={name: dict(sums) for name, sums in run.totals.environments.items()},
        # No decision depends on blobs.
        max_blob_bytes=MAX_BLOBS_BYTES,
    )


def _awaited(run: RunState, now: int) -> tuple[int, str]:
    (step, since), (count, first, last) = run.stale_wait, run.awaited
    waits = step == run.next_step and now - last <= AWAITED_MS and last - since < run.policy.stale_wait_ms
    return (count, first) if waits else (0, "")


def existing_groups(run: RunState) -> dict[str, Amount]:
    """Amounts of the states whose groups can be counted."""
    counted: dict[str, Amount] = {state: Amount() for state in LIVE}
    in_steps = (group for step in run.steps.values() for group in step.groups if group.state in counted)
    for group in (*run.queue, *in_steps):
        counted[group.state] = add(counted[group.state], group.amount)
    return counted
