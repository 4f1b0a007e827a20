"""What happens at the end of every history, so that what no dump shows makes a difference after all.

A dump does not tell in which order tasks are pending, until when they back off, how often they have failed, what they
continue and how stale that is, or what the queue and the steps hold. So: the run is released, every task is leased and
failed until nothing is left to lease, then the queue is emptied batch by batch, and every stored step is read again.
"""

import dataclasses

from buffer_service.domain import ops
from buffer_service.domain.policy import UNSET, RunPolicy
from tests.model.pair import Pair

WORKER, INSTANCE, ENGINE = "uncovers", "p1", "e9"
ALL = 256


def uncover(pair: Pair) -> None:
    """Lease, fail, pull and read everything there is."""
    if pair.view.paused:
        pair.both("resume", ops.Resume(None, ops.ResumeMode.REPLAY, "uncover", allow_regenerate=False))
    pair.both("update_policy", _without_caps(pair.view.policy))
    _publish(pair)
    _fail_everything(pair)
    _read_everything(pair)


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
