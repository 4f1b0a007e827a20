"""What happens at the end of every history, so that what no dump shows makes a difference after all.

A dump does not tell in which order tasks are pending, until when they back off, how often they have failed, what they
continue and how stale that is, or what the queue and the steps hold. So: the first lease is outlived, the run is
released and often all its steps are queued again, every task is leased and failed until nothing is left to lease, the
queue is emptied batch by batch, and every stored step is read.
"""

import dataclasses

from buffer_service.domain import ops
from buffer_service.domain.policy import UNSET, RunPolicy
from tests.model.pair import Pair

WORKER, INSTANCE, ENGINE = "uncovers", "p1", "e9"
ALL = 256


def uncover(pair: Pair) -> None:
    """Outlive a lease; lease, fail, pull and read everything there is."""
    _outlive_a_lease(pair)
    view = pair.view
    if view.paused or view.revision % 2:
        mode = ops.ResumeMode.REQUEUE if view.revision % 2 else ops.ResumeMode.REPLAY
        pair.both("resume", ops.Resume(view.checkpointed_steps, mode, "uncover", allow_regenerate=False))
    pair.both("update_policy", _without_caps(pair.view.policy))
    _publish(pair)
    _fail_everything(pair)
    _read_everything(pair)


def _outlive_a_lease(pair: Pair) -> None:
    """The first lease that expires is lost by a millisecond; those that expire later are not."""
    leases = pair.leases()
    ahead = [lease.expiry + 1 - pair.now for lease in leases.values() if lease.expiry >= pair.now]
    if ahead:
        pair.advance(min(ahead))
    for lease_id, lease in sorted(leases.items()):
        pair.both("extend", lease.worker_id, lease.instance_id, [lease_id])


def _without_caps(policy: RunPolicy) -> RunPolicy:
    """Nothing keeps work back but age: continuations and groups from before the next version are too stale."""
    return dataclasses.replace(
        policy,
        batch_groups=1,
        max_inflight_groups=0,
        reserve_queue_space=False,
        max_lookahead=UNSET,
        max_staleness=1,
        prefetch_batches=0,
        batches_per_publish=1_000,
        failure_budget=UNSET,
    )


def _publish(pair: Pair) -> None:
    """What is as old as the present version, or counts as it, is one version behind from now on."""
    view = pair.view
    pair.both("publish", ops.Publish(view.epoch, view.published.version + 2, b"uncover", None))


def _fail_everything(pair: Pair) -> None:
    for number in range(100):
        ask = ops.LeaseAsk(WORKER, INSTANCE, f"uncover-{number}", ENGINE, pair.view.published, ALL)
        leased = pair.both("lease", ask)
        if leased.grants:
            returns = [
                ops.LeaseReturn(grant.lease_id, ops.ReturnKind.FAILED, "uncovered", b"", None, 0)
                for grant in leased.grants
            ]
            pair.both("give_back", WORKER, INSTANCE, returns)
        ahead = [moment - pair.now for moment in pair.moments() if moment > pair.now]
        if not ahead:
            return
        pair.advance(min(ahead))


def _read_everything(pair: Pair) -> None:
    world_size = pair.view.world_size or 1
    pulled = True
    while pulled:
        view = pair.view
        train_version = view.published.version
        pull = ops.Pull(view.epoch, view.next_step, 0, world_size, train_version)
        pulled = isinstance(pair.both("pull", pull), ops.Batch)
    view = pair.view
    for step in range(view.checkpointed_steps, view.next_step):
        for rank in range(world_size):
            pair.both("pull", ops.Pull(view.epoch, step, rank, world_size, None))
