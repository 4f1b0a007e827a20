"""Uncovering at the end of every history, so that what no dump shows makes a difference after all.

A dump does not tell in which order tasks are pending, until when they back off, or how often they have failed. Nor does
it tell what they continue and how stale that is, or who waits in which place for room. It is silent on whose turn it is
among environments, which engines have a permit to load, and what the queue and the steps hold. So: engines ask for
places; the first lease is outlived, the run is released and often all its steps are queued again. Blocked groups are
tried from the end of the line, and every task is leased and failed until nothing is left to lease. Every stored
micro-batch is read, and the queue is emptied group by group.
"""

import dataclasses

from buffer_service.domain import ops
from buffer_service.domain.policy import UNSET, RunPolicy, StaleAction
from buffer_service.rules.pauses import Pause
from tests.model.notation import Entry
from tests.model.pair import Pair
from tests.model.universe import LOADERS

WORKER, INSTANCE, ENGINE = "uncovers", "p1", "e9"
ALL = 256


def uncover(pair: Pair) -> None:
    """Outlive a lease; lease, fail, pull and read everything there is."""
    _outlive_a_lease(pair)
    view = _view(pair)
    if view.paused or view.draining:
        pair.both("continue_run")
    if view.paused == Pause.STORE_ROLLED_BACK or view.revision % 3 == 0:
        mode = ops.ResumeMode.REQUEUE if view.revision % 2 else ops.ResumeMode.REPLAY
        pair.both("resume", ops.Resume(view.checkpointed_steps, mode, "uncover", allow_regenerate=False))
    _ask_to_load(pair)
    pair.both("update_policy", _without_caps(_view(pair).policy))
    _empty_the_line(pair)
    _publish(pair)
    _fail_everything(pair)
    _read_everything(pair)
    pair.do(Entry("sweep"))


def _view(pair: Pair) -> ops.RunView:
    assert pair.view is not None
    return pair.view


def _outlive_a_lease(pair: Pair) -> None:
    """The first lease that expires is lost by a millisecond; those that expire later are not."""
    leases = pair.inside.leases()
    expiries = [lease.expiry for lease in leases.values()]
    expiries += [hold.expiry for _, hold in pair.inside.stages().values()]
    ahead = [expiry + 1 - pair.now for expiry in expiries if expiry >= pair.now]
    if ahead:
        pair.do(Entry("time", (min(ahead),)))
    for lease_id, lease in sorted(leases.items()):
        pair.both("extend", lease.worker_id, lease.instance_id, [lease_id])
    for lease_id, (_, hold) in sorted(pair.inside.stages().items()):
        pair.both("extend", hold.worker_id, hold.instance_id, [lease_id])


def _ask_to_load(pair: Pair) -> None:
    """Whoever has a permit keeps it; of the others as many get one as are left."""
    if _view(pair).policy.max_unavailable_engines:
        for engine_id in reversed(LOADERS):
            loaded = _view(pair).published
            report = ops.EngineReport(engine_id, WORKER, "loading", loaded, 0, 0, "", 0, wants_load=True)
            pair.both("report_engine", report)


def _without_caps(policy: RunPolicy) -> RunPolicy:
    """Nothing keeps work back but age: partial rollouts and groups from before the next version are too stale."""
    return dataclasses.replace(
        policy,
        # Waiting needs the lookahead, and a window room.
        stale_action=StaleAction.DROP if policy.stale_action is StaleAction.WAIT else policy.stale_action,
        order_window_groups=0,
        target_staleness_milli=0,
        stages=(),
        batch_groups=1,
        batch_tokens=0,
        micro_batch_groups=0,
        max_uses=1,
        reuse_share_milli=0,
        reuse_max_staleness=UNSET,
        equal_shards=False,
        max_queued_groups=1_000,
        max_queued_tokens=0,
        max_queued_bytes=1 << 40,
        quota_groups=0,
        quota_tokens=0,
        quota_bytes=0,
        max_inflight_groups=0,
        reserve_queue_space=False,
        max_lookahead=UNSET,
        max_staleness=1,
        cancel_stale_leases=False,
        max_version_spread=UNSET,
        prefetch_batches=0,
        batches_per_publish=1_000,
        failure_budget=UNSET,
    )


def _empty_the_line(pair: Pair) -> None:
    """Each blocked group is tried alone, the last one first: only the head of the line gets in."""
    while pair.waiting:
        before = len(pair.waiting)
        for one in reversed(list(pair.waiting.values())):
            pair.do(Entry("retry_push", names=(one.name,), replica=one.replica))
        if len(pair.waiting) == before:
            pair.do(Entry("abandon_push", names=tuple(pair.waiting)))


def _publish(pair: Pair) -> None:
    """Publish: what is as old as the present version, or counts as it, is one version behind from now on."""
    view = _view(pair)
    pair.both("publish", ops.Publish(view.term, view.published.version + 2, b"uncover", None))


def _fail_everything(pair: Pair) -> None:
    for number in range(100):
        ask = ops.LeaseAsk(WORKER, INSTANCE, f"uncover-{number}", ENGINE, _view(pair).published, ALL)
        leased = pair.both("lease", ask)
        if leased.grants:
            returns = [
                ops.LeaseReturn(grant.lease_id, ops.ReturnKind.FAILED, "uncovered", b"", None, 0)
                for grant in leased.grants
            ]
            pair.both("give_back", WORKER, INSTANCE, returns)
        due = [moment - pair.now for moment in pair.inside.due() if moment > pair.now]
        if not due:
            return
        pair.do(Entry("time", (min(due),)))


def _read_everything(pair: Pair) -> None:
    world_size = _view(pair).world_size or 1
    view = _view(pair)
    for step in range(view.checkpointed_steps, view.next_step + 1):
        for number in range(pair.inside.micro_batches_of(step)):
            for rank in range(world_size):
                pair.both("pull", ops.Pull(view.term, step, rank, world_size, None, number))
    _empty_the_queue(pair)
    if pair.inside.micro_batches_of(_view(pair).next_step):
        pair.both("resume", ops.Resume(_view(pair).next_step, ops.ResumeMode.REQUEUE, "open", allow_regenerate=False))
        _empty_the_queue(pair)


def _empty_the_queue(pair: Pair) -> None:
    """Batch by batch, until there is nothing left."""
    pulled = True
    while pulled:
        view = _view(pair)
        world_size = view.world_size or 1
        number = pair.inside.micro_batches_of(view.next_step)
        pulled = isinstance(
            pair.both("pull", ops.Pull(view.term, view.next_step, 0, world_size, None, number)), ops.Batch
        )
