import pytest

from buffer_service.domain import ops
from buffer_service.domain.ops import WeightVersion
from buffer_wire.errors import (
    FailureBudgetExceeded,
    InvalidField,
    ReplayGap,
    StaleTerm,
    StepAhead,
    WorldSizeMismatch,
)
from tests.oracle.behaviour.world import World


def test_a_batch_takes_the_oldest_groups_and_leaves_the_rest() -> None:
    world = World(batch_groups=2, max_queued_groups=5)
    names = world.queue(5)
    assert world.names(0) == names[:2]
    assert world.batch(1).queued == 1
    assert (world.groups("delivered"), world.groups("queued")) == (4, 1)


def test_too_few_groups_are_short_and_change_nothing() -> None:
    world = World(batch_groups=3)
    world.queue(1)
    world.submit("a", "b")
    world.lease()
    before = world.view
    short = world.pull(world_size=2)
    assert isinstance(short, ops.Short)
    assert (short.queued, short.needed, short.leased, short.pending) == (1, 3, 1, 1)
    assert world.view == before, "not even the world size"


def test_totals_are_those_of_all_ranks() -> None:
    world = World(batch_groups=3)
    for name, tokens in {"a": 30, "b": 10, "c": 20}.items():
        world.push(name, tokens=tokens)
    first, second = world.batch(rank=0, world_size=2), world.batch(0, rank=1, world_size=2)
    assert [group.group_id for group in first.shard] == ["a/0"]
    assert [group.group_id for group in second.shard] == ["b/0", "c/0"]
    assert (first.shard_tokens, second.shard_tokens) == (30, 30)
    for batch in (first, second):
        assert (batch.total_groups, batch.total_samples) == (3, 6)
        assert (batch.total_tokens, batch.total_loss_tokens) == (60, 30)
    assert (first.replayed, second.replayed) == (False, True)


def test_the_same_rank_always_gets_the_same_groups() -> None:
    world = World(batch_groups=2, max_queued_groups=4)
    world.queue(4)
    first = world.batch(0)
    world.batch(1)
    world.publish(1, commit=1)
    again = world.batch(0)
    assert again.shard == first.shard
    assert again.train_version == first.train_version


def test_steps_assemble_in_order() -> None:
    world = World(batch_groups=1)
    world.queue(1)
    with pytest.raises(StepAhead) as refused:
        world.pull(1)
    assert refused.value.attributes == {"step": "1", "next_step": "0"}


def test_the_world_size_is_fixed_by_the_first_batch_of_a_term() -> None:
    world = World(batch_groups=1)
    world.queue(1)
    world.batch(world_size=2)
    with pytest.raises(WorldSizeMismatch):
        world.pull(0, world_size=3)
    world.resume(0)
    assert world.batch(0, world_size=3).total_groups == 1
    with pytest.raises(WorldSizeMismatch):
        world.pull(0, world_size=2)


def test_a_replay_for_another_world_size_is_sharded_anew_and_then_stays() -> None:
    world = World(batch_groups=4)
    names = world.queue(4)
    world.batch(world_size=1)
    world.resume(0)
    shards = [world.names(0, rank=rank, world_size=2) for rank in range(2)]
    assert sorted(shards[0] + shards[1]) == sorted(names)
    assert [world.names(0, rank=rank, world_size=2) for rank in range(2)] == shards


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_of_the_world_is_refused(rank: int) -> None:
    with pytest.raises(InvalidField) as refused:
        World().pull(rank=rank, world_size=2)
    assert refused.value.attributes["field"] == "rank"


def test_a_superseded_trainer_pulls_nothing() -> None:
    world = World(batch_groups=1)
    world.queue(1)
    world.resume()
    world.term = 1
    with pytest.raises(StaleTerm):
        world.pull()
    assert world.groups("queued") == 1


def test_a_train_version_below_the_published_one_is_refused() -> None:
    world = World(batch_groups=1)
    world.queue(1)
    world.publish(3)
    with pytest.raises(InvalidField, match="at least the published version 3"):
        world.pull(train_version=2)


def test_a_freed_step_is_a_replay_gap() -> None:
    world = World(batch_groups=1)
    world.train(2)
    world.checkpoint(0)
    with pytest.raises(ReplayGap) as refused:
        world.pull(0)
    assert refused.value.attributes == {"step": "0", "first_retained": "1"}


def test_a_pull_of_a_run_with_too_many_failures_says_which_was_the_last() -> None:
    world = World(batch_groups=1, max_attempts=1, failure_budget=0)
    world.submit("a")
    world.fail(world.lease_one().lease_id, "engine caught fire")
    world.queue(2)
    with pytest.raises(FailureBudgetExceeded) as refused:
        world.pull()
    assert refused.value.attributes == {"failed": "1", "budget": "0", "last_error": "engine caught fire"}


def test_a_stored_step_is_repeated_while_the_run_is_paused() -> None:
    world = World(batch_groups=1, max_attempts=1, failure_budget=0)
    world.submit("a")
    world.queue(1)
    first = world.batch(0)
    world.fail_for_good()
    assert world.batch(0).shard == first.shard


# ── staleness ──


def test_staleness_of_a_batch_and_of_the_run() -> None:
    world = World(batch_groups=2)
    world.push("a", head=1, tail=2, spans=True)
    world.push("b", head=3, tail=3)
    batch = world.batch(train_version=5)
    assert (batch.staleness_sum, batch.staleness_max, batch.train_version) == (4 + 2, 4, 5)
    assert world.statistic("staleness_sum") == 6
    assert world.statistic("pre_queue_staleness_sum") == 1
    assert world.statistic("in_queue_staleness_sum") == 3 + 2
    assert world.statistic("staleness_max") == 4
    assert world.statistic("assembled_groups") == 2
    assert world.statistic("assembled_groups_spanning_versions") == 1


def test_groups_from_weights_newer_than_the_batch_have_no_negative_staleness() -> None:
    world = World(batch_groups=1)
    world.push("a", head=2, tail=3)
    assert world.batch(train_version=1).staleness_sum == 0
    assert world.statistic("in_queue_staleness_sum") == 0


def test_the_gate_drops_what_is_too_stale_and_takes_what_is_just_fresh_enough() -> None:
    world = World(batch_groups=1, max_queued_groups=3, max_staleness=2)
    world.push("stale", head=2)
    world.push("fresh", head=3)
    assert world.names(train_version=5) == ["fresh/0"]
    assert world.groups("dropped_stale") == 1


def test_the_gate_is_at_the_head_not_at_the_tail() -> None:
    world = World(batch_groups=1, max_staleness=2)
    world.push("a", head=0, tail=5)
    assert isinstance(world.pull(train_version=5), ops.Short)
    assert world.groups("dropped_stale") == 1


def test_eviction_stays_when_no_batch_results() -> None:
    world = World(batch_groups=2, max_queued_groups=3, max_staleness=0)
    world.queue(2)
    revision = world.view.revision
    short = world.pull(train_version=1)
    assert isinstance(short, ops.Short)
    assert (short.queued, short.revision) == (0, revision + 1)
    assert world.groups("dropped_stale") == 2


def test_a_recycled_group_starts_its_task_anew_ahead_of_fresh_ones() -> None:
    world = World(batch_groups=1, max_staleness=0, stale_action="recycle")
    world.submit("a")
    world.interrupt(world.lease_one().lease_id, partial_rollout=b"of incarnation 0")
    world.push(world.lease_one())
    world.submit("fresh")
    assert isinstance(world.pull(train_version=1), ops.Short)
    assert (world.groups("recycled"), world.tasks("completed"), world.tasks("pending")) == (1, 0, 2)
    grant = world.lease_one()
    assert (grant.lease_id, grant.partial_rollout) == ("a/1/1", b"")


def test_a_recycled_task_may_fail_as_often_as_a_new_one() -> None:
    world = World(batch_groups=1, max_staleness=0, stale_action="recycle", max_attempts=2, retry_backoff_ms=0)
    world.submit("a")
    world.fail(world.lease_one().lease_id)
    world.push(world.lease_one())
    world.pull(train_version=1)
    assert world.fail(world.lease_one().lease_id) is ops.ReturnOutcome.PENDING


def test_a_group_pushed_without_a_lease_is_dropped_where_others_are_recycled() -> None:
    world = World(batch_groups=1, max_staleness=0, stale_action="recycle")
    world.queue(1)
    world.pull(train_version=1)
    assert (world.groups("recycled"), world.groups("dropped_stale")) == (0, 1)


# ── lost payloads ──


def test_a_lost_group_leaves_its_step_and_its_task_starts_anew() -> None:
    world = World(batch_groups=2)
    world.submit("a", "b")
    for grant in world.lease(2).grants:
        world.push(grant, head=int(grant.task_id == "b"))
    world.batch(train_version=3)
    world.lose(0, "a/0", "unknown/0")
    batch = world.batch(0)
    assert [group.group_id for group in batch.shard] == ["b/0"]
    assert (batch.total_groups, batch.total_tokens, batch.shard_tokens) == (1, 10, 10)
    assert (batch.staleness_sum, batch.staleness_max) == (2, 2)
    assert (world.groups("lost"), world.groups("delivered")) == (1, 1)
    assert world.lease_one().lease_id == "a/1/1"


def test_a_trained_group_cannot_be_lost_any_more() -> None:
    world = World(batch_groups=1)
    world.queue(1)
    (name,) = world.names()
    world.commit(0)
    before = world.view
    world.lose(0, name)
    world.lose(7, name)
    assert world.view == before


def test_a_lost_group_of_a_task_without_leases_is_not_replaced() -> None:
    world = World(batch_groups=1)
    world.queue(1)
    (name,) = world.names()
    world.lose(0, name)
    assert (world.groups("lost"), world.tasks("completed")) == (1, 1)
    assert world.batch(0).total_groups == 0


def test_heads_of_an_abandoned_timeline_count_as_the_fork_at_the_gate() -> None:
    world = World(batch_groups=1, max_queued_groups=2, max_staleness=1)
    world.train(3, head=3)
    world.queue(1, head=3)
    world.resume(1)
    world.push("late", head=WeightVersion(1, 3))
    world.resume(1, ops.ResumeMode.DISCARD)
    assert isinstance(world.pull(train_version=3), ops.Short)
    assert world.groups("dropped_stale") == 2
