import pytest

from buffer_service.domain import ops
from buffer_service.domain.ops import LeaseState, PushKind, ResumeMode, WeightVersion
from buffer_service.domain.policy import RunPolicy
from buffer_wire.errors import (
    NotCommitted,
    ReplayGap,
    RunPaused,
    StaleTerm,
    StepAhead,
    StoreRolledBack,
    VersionConflict,
)
from tests.oracle.behaviour.world import RUN, World
from tests.oracle.rules.proofs import prove

# ── commit and publish ──


def test_a_commit_settles_every_step_up_to_it_and_repeats_without_effect() -> None:
    world = World(batch_groups=1, max_queued_groups=3)
    world.queue(3)
    for _ in range(3):
        world.batch()
    assert world.commit(1) == 2
    assert (world.groups("trained"), world.groups("delivered")) == (2, 1)
    before = world.view
    assert world.commit(0) == world.commit(1) == 2
    assert world.view == before


def test_a_step_that_is_not_assembled_cannot_be_committed() -> None:
    world = World(batch_groups=1)
    world.queue(1)
    world.batch()
    before = world.view
    for attempt in (lambda: world.commit(1), lambda: world.publish(1, commit=1)):
        with pytest.raises(StepAhead) as refused:
            attempt()
        assert refused.value.attributes == {"step": "1", "next_step": "1"}
    assert world.view == before


def test_a_publish_commits_in_the_same_decision() -> None:
    world = World(batch_groups=1)
    world.queue(1)
    world.batch()
    published = world.publish(5, commit=0)
    assert (published.published, published.committed_steps) == (WeightVersion(1, 5), 1)
    assert world.groups("trained") == 1
    assert world.model.weights(RUN).manifest == b"manifest 5"


def test_an_exact_repeat_of_a_publish_only_commits() -> None:
    world = World(batch_groups=1)
    world.publish(5)
    before = world.view
    world.publish(5)
    assert world.view == before
    world.queue(1)
    world.batch()
    assert world.publish(5, commit=0).committed_steps == 1


@pytest.mark.parametrize(("version", "manifest"), [(5, b"another"), (4, b"manifest 5"), (0, b"")])
def test_a_version_is_published_once_and_versions_rise(version: int, manifest: bytes) -> None:
    world = World()
    world.publish(5)
    before = world.view
    with pytest.raises(VersionConflict) as refused:
        world.publish(version, manifest=manifest)
    assert refused.value.attributes == {"version": str(version), "published": "5"}
    assert world.view == before


def test_a_superseded_trainer_neither_commits_nor_publishes_nor_checkpoints() -> None:
    world = World(batch_groups=1)
    world.train()
    world.resume()
    world.term = 1
    before = world.view
    for attempt in (lambda: world.commit(0), lambda: world.publish(2), lambda: world.checkpoint(0)):
        with pytest.raises(StaleTerm):
            attempt()
    assert world.view == before


# ── checkpoint and retention ──


def test_a_checkpoint_frees_steps_and_keeps_what_was_counted() -> None:
    world = World(batch_groups=1)
    world.train(3)
    assert world.checkpoint(1) == 2
    assert world.groups("trained") == world.groups("accepted") == 3
    assert world.model.stored_bodies(RUN) == 1
    assert world.batch(2).total_groups == 1
    assert world.checkpoint(0) == 2


def test_a_step_that_is_not_committed_cannot_be_checkpointed() -> None:
    world = World(batch_groups=1, max_queued_groups=2)
    world.queue(2)
    world.batch()
    world.batch()
    world.commit(0)
    with pytest.raises(NotCommitted) as refused:
        world.checkpoint(1)
    assert refused.value.attributes == {"step": "1", "committed_steps": "1"}


def test_tombstones_of_tasks_that_ended_go_with_the_next_checkpoint() -> None:
    world = World(batch_groups=1, max_attempts=1)
    world.train()
    world.submit("dropped", "failed")
    dropped = world.lease_one()
    world.push(dropped)
    world.queue(1)
    world.fail_for_good()
    assert world.push(dropped) is PushKind.DUPLICATE
    world.checkpoint(0)
    assert world.push(dropped) is PushKind.UNKNOWN_LEASE
    world.submit("dropped", "failed")


def test_a_tombstone_stays_while_its_group_is_queued_or_retained() -> None:
    world = World(batch_groups=1, max_queued_groups=2)
    world.train()
    queued, retained = world.queue(2)
    world.batch()
    world.checkpoint(0)
    assert world.push(queued.removesuffix("/0")) is PushKind.DUPLICATE
    assert world.push(retained.removesuffix("/0")) is PushKind.DUPLICATE


def test_without_checkpoints_only_the_newest_committed_steps_are_retained() -> None:
    world = World(batch_groups=1, retained_steps=2)
    world.train(5)
    assert world.view.checkpointed_steps == 3
    with pytest.raises(ReplayGap):
        world.pull(2)
    assert world.batch(3).replayed


def test_a_repeated_commit_frees_nothing_when_retention_was_lowered_meanwhile() -> None:
    world = World(batch_groups=1)
    world.train(3)
    world.do(world.model.update_policy, _with(world, retained_steps=1))
    before = world.view
    world.commit(2)
    assert world.view == before
    world.train()
    assert world.view.checkpointed_steps == 3


# ── resume ──


def test_a_resume_raises_the_term_and_puts_the_clock_back() -> None:
    world = World(batch_groups=1)
    world.train(4)
    resumed = world.resume(2)
    assert (resumed.term, resumed.next_step, resumed.next_unassembled_step, resumed.version) == (2, 2, 4, 2)
    assert world.view.published == WeightVersion(2, 2)
    assert world.model.weights(RUN).manifest == b"manifest 2"
    assert world.publish(3).published == WeightVersion(2, 3)


def test_a_resume_without_a_step_goes_on_after_the_last_commit() -> None:
    world = World(batch_groups=1, max_queued_groups=2)
    world.train(2)
    world.queue(1)
    world.batch()
    resumed = world.resume()
    assert (resumed.next_step, resumed.next_unassembled_step, resumed.version) == (2, 3, 2)


def test_a_fresh_start_is_version_zero() -> None:
    world = World(batch_groups=1)
    world.train(2)
    assert world.resume(0).version == 0
    assert world.model.weights(RUN).manifest == b""


def test_a_repeated_resume_gets_the_same_term() -> None:
    world = World(batch_groups=1)
    world.train(2)
    first = world.resume(1, request_id="again")
    before = world.view
    assert world.resume(0, request_id="again") == first
    assert world.view == before


def test_replay_returns_the_same_batches_and_trains_each_once_more() -> None:
    world = World(batch_groups=2)
    world.train(3)
    world.term = 1
    stored = [world.names(step) for step in range(3)]
    world.resume(1)
    assert [world.names(step) for step in range(3)] == stored
    assert (world.groups("trained"), world.groups("delivered")) == (2, 4)
    world.publish(2, commit=2)
    assert (world.groups("trained"), world.groups("accepted")) == (6, 6)


def test_requeue_puts_groups_back_in_their_order() -> None:
    world = World(batch_groups=2, max_queued_groups=4)
    names = world.queue(4)
    world.batch(0)
    world.batch(1)
    world.resume(0, ResumeMode.REQUEUE)
    assert (world.groups("queued"), world.view.next_step) == (4, 0)
    assert world.names(0) + world.names(1) == names


def test_requeue_drops_the_oldest_above_the_caps_whatever_the_overflow_action() -> None:
    world = World(batch_groups=1, max_queued_groups=2, overflow_action="block")
    names = world.queue(2)
    world.batch()
    world.batch()
    newer = world.queue(2)
    world.resume(0, ResumeMode.REQUEUE)
    assert world.groups("dropped_overflow") == len(names)
    assert [world.names()[0], world.names()[0]] == newer


def test_requeued_groups_free_lookahead() -> None:
    world = World(batch_groups=1, max_lookahead=0)
    world.queue(1)
    world.batch()
    world.submit("a")
    assert world.lease().wait is ops.LeaseWait.AT_CAPACITY
    world.resume(0, ResumeMode.DISCARD)
    assert len(world.lease().grants) == 1


def test_discard_ends_the_groups_of_later_steps() -> None:
    world = World(batch_groups=1)
    world.train(3)
    world.resume(1, ResumeMode.DISCARD)
    assert (world.groups("discarded"), world.groups("trained"), world.view.next_step) == (2, 1, 1)
    assert world.names(0)


def test_versions_of_the_abandoned_timeline_are_clamped_where_they_are_stored() -> None:
    world = World(batch_groups=1, max_queued_groups=2)
    world.train(3, head=3)
    world.queue(1, head=3)
    world.resume(2)
    (retained,) = world.batch(2).shard
    (queued,) = world.batch(3).shard
    assert (retained.head_version, retained.tail_version) == (2, 2)
    assert (queued.head_version, queued.tail_version) == (2, 2)


def test_versions_that_arrive_late_from_an_abandoned_timeline_are_clamped_on_arrival() -> None:
    world = World(batch_groups=1)
    world.train(3)
    world.resume(1)
    world.push("late", head=WeightVersion(1, 1), tail=WeightVersion(1, 3))
    (group,) = world.batch(3).shard
    assert (group.head_version, group.tail_version) == (1, 1)


def test_a_partial_rollout_of_the_abandoned_timeline_is_as_old_as_the_fork() -> None:
    world = World(batch_groups=1, max_staleness=1)
    world.train(3, head=3)
    world.submit("a")
    world.interrupt(world.lease_one().lease_id, partial_rollout=b"so far", head=3, tokens=5)
    world.resume(1, ResumeMode.DISCARD)
    world.train(2, head=3)
    world.lease()
    assert world.statistic("partial_rollout_tokens_discarded") == 5


def test_live_leases_survive_a_resume() -> None:
    world = World(batch_groups=1)
    world.submit("a")
    grant = world.lease_one()
    world.resume()
    assert world.extend(grant.lease_id) == [LeaseState.LIVE]
    assert world.push(grant) is PushKind.QUEUED


def test_a_step_that_was_never_assembled_cannot_be_resumed_at() -> None:
    world = World()
    with pytest.raises(StepAhead):
        world.resume(1)
    assert world.view.term == 1


def test_freed_replay_data_is_a_gap_unless_told_to_regenerate() -> None:
    world = World(batch_groups=1, max_queued_groups=2)
    world.train(4)
    world.checkpoint(2)
    with pytest.raises(ReplayGap) as refused:
        world.resume(1)
    assert refused.value.attributes == {"step": "1", "first_retained": "3"}
    resumed = world.resume(1, allow_regenerate=True)
    assert (resumed.next_step, resumed.next_unassembled_step, resumed.version) == (1, 1, 0)
    assert world.view.checkpointed_steps == world.view.committed_steps == 1
    assert world.groups("queued") == 1, "what was retained goes back into the queue"
    world.train(1)


def test_the_version_of_the_checkpoint_is_still_known_after_it() -> None:
    world = World(batch_groups=1)
    world.train(4)
    world.checkpoint(2)
    assert world.resume(3).version == 3


def test_the_newest_version_of_a_step_counts() -> None:
    world = World(batch_groups=1)
    world.train(1)
    world.publish(7)
    world.train(1)
    assert world.resume(1).version == 7


# ── pauses ──


def test_a_run_that_failed_too_often_stops_and_goes_on_with_a_higher_budget() -> None:
    world = World(batch_groups=1, max_attempts=1, failure_budget=0)
    world.submit("a", "b")
    world.fail_for_good()
    assert world.view.paused == "failure_budget_exceeded"
    assert world.push("own") is PushKind.QUEUED, "finished work is still taken"
    world.do(world.model.update_policy, _with(world, failure_budget=1))
    assert world.view.paused == ""
    world.fail_for_good()
    world.resume()
    assert world.view.paused == "failure_budget_exceeded"
    world.do(world.model.update_policy, _with(world, failure_budget=-1))
    assert world.view.paused == ""


def test_a_budget_below_the_failures_so_far_pauses_at_once() -> None:
    world = World(max_attempts=1)
    world.submit("a")
    world.fail_for_good()
    world.do(world.model.update_policy, _with(world, failure_budget=0))
    assert world.view.paused == "failure_budget_exceeded"


def test_a_store_behind_its_callers_pauses_until_a_resume() -> None:
    world = World(batch_groups=1)
    world.submit("a", "b")
    grant = world.lease_one()
    world.queue(1)
    with pytest.raises(StoreRolledBack) as refused:
        world.model.extend(RUN, "worker", "process-1", [], seen_revision=prove("", 1_000))
    behind = world.view.revision
    assert refused.value.attributes["revision"] == str(behind)
    assert world.lease().wait is ops.LeaseWait.PAUSED
    assert world.extend(grant.lease_id) == [LeaseState.LIVE]
    assert world.interrupt(grant.lease_id) is ops.ReturnOutcome.PENDING
    for attempt in (
        lambda: world.submit("c"),
        lambda: world.push("own"),
        world.pull,
        lambda: world.commit(0),
        lambda: world.publish(1),
        lambda: world.checkpoint(0),
    ):
        with pytest.raises(RunPaused, match="store_rolled_back"):
            attempt()
    assert world.model.weights(RUN).paused
    assert world.resume().revision == 1_001
    assert world.view.paused == ""
    world.batch()


def test_what_a_caller_has_seen_does_not_raise_the_revision() -> None:
    world = World()
    with pytest.raises(StoreRolledBack):
        world.model.update_policy(RUN, world.view.policy, seen_revision=prove("", 2))
    world.do(world.model.extend, "worker", "process-1", [])
    with pytest.raises(RunPaused):
        world.submit("a")
    assert world.view.revision == 1


def _with(world: World, **changes: int) -> RunPolicy:
    return RunPolicy.from_store({**world.view.policy.to_store(), **changes})
