"""Streamed steps: micro-batches of world_size * m groups as soon as they are there."""

import pytest

from buffer_service.domain import ops
from buffer_wire.errors import FailureBudgetExceeded, InvalidField, StepAhead
from tests.oracle.behaviour.world import World, shares


def streaming(**policy: object) -> World:
    return World(**{"batch_groups": 6, "micro_batch_groups": 1, "max_queued_groups": 9, **policy})


def states(world: World) -> tuple[int, int, int]:
    return world.groups("queued"), world.groups("forming"), world.groups("delivered")


def close(world: World, micro_batch: int, count: int, *, world_size: int = 2, **facts: int) -> ops.Batch:
    """Queue that many groups and pull rank 0's part of the micro-batch of the next step."""
    world.queue(count, **facts)
    return world.batch(micro_batch=micro_batch, world_size=world_size)


def test_a_step_closes_micro_batch_by_micro_batch() -> None:
    world = streaming()
    first = close(world, 0, 3)
    assert (first.micro_batch, first.final, first.total_groups, first.queued) == (0, False, 2, 1)
    assert (states(world), world.view.next_step) == ((1, 2, 0), 0)
    second = close(world, 1, 1)
    assert (second.micro_batch, second.final, second.total_groups) == (1, False, 4)
    last = close(world, 2, 2)
    assert (last.micro_batch, last.final, last.total_groups, last.total_tokens) == (2, True, 6, 60)
    assert (states(world), world.view.next_step) == ((0, 0, 6), 1)


def test_a_micro_batch_waits_for_its_groups() -> None:
    world = streaming(micro_batch_groups=2)
    world.queue(3)
    short = world.pull(world_size=2)
    assert isinstance(short, ops.Short)
    assert (short.queued, short.needed) == (3, 4)
    close(world, 0, 1)
    short = world.pull(micro_batch=1, world_size=2)
    assert isinstance(short, ops.Short)
    assert short.needed == 2, "what the step still lacks"


def test_every_rank_gets_its_part_of_each_micro_batch_and_totals_up_to_it() -> None:
    world = streaming()
    close(world, 0, 2)
    close(world, 1, 2)
    other = world.batch(0, rank=1, micro_batch=0, world_size=2)
    assert (other.replayed, other.final, other.total_groups, len(other.shard)) == (True, False, 2, 1)
    other = world.batch(0, rank=1, micro_batch=1, world_size=2)
    assert (other.total_groups, other.total_samples, other.total_loss_tokens) == (4, 8, 20)


def test_micro_batches_of_a_complete_step_are_repeated_and_only_the_last_is_final() -> None:
    world = streaming()
    closed = [close(world, micro_batch, 2) for micro_batch in range(3)]
    again = [world.batch(0, micro_batch=micro_batch, world_size=2) for micro_batch in range(3)]
    assert [one.shard for one in again] == [one.shard for one in closed]
    assert [one.final for one in again] == [False, False, True]
    with pytest.raises(InvalidField) as refused:
        world.pull(0, micro_batch=3, world_size=2)
    assert refused.value.attributes["limit"] == "below 3, the micro-batches of step 0"


def test_micro_batches_close_in_order() -> None:
    world = streaming()
    world.queue(9)
    with pytest.raises(InvalidField) as refused:
        world.pull(micro_batch=1, world_size=2)
    assert refused.value.attributes["limit"] == "at most 0, the next micro-batch of step 0"
    world.batch(world_size=2)
    with pytest.raises(InvalidField) as refused:
        world.pull(micro_batch=2, world_size=2)
    assert refused.value.attributes["limit"] == "at most 1, the next micro-batch of step 0"
    with pytest.raises(StepAhead):
        world.pull(1, world_size=2)


def test_an_open_step_cannot_be_committed() -> None:
    world = streaming()
    close(world, 0, 2)
    with pytest.raises(StepAhead):
        world.commit(0)


def test_a_token_budget_closes_a_streamed_step_early() -> None:
    world = streaming(batch_tokens=35)
    assert not close(world, 0, 2).final
    last = close(world, 1, 2)
    assert (last.final, last.total_groups, last.total_tokens) == (True, 4, 40)


def test_a_token_budget_that_is_met_exactly_closes_the_step() -> None:
    world = streaming(batch_tokens=20)
    assert close(world, 0, 2).final


def test_tokens_do_not_make_a_micro_batch_ready() -> None:
    world = streaming(batch_tokens=20)
    world.queue(1, tokens=500)
    assert isinstance(world.pull(world_size=2), ops.Short)


def test_the_form_of_a_step_is_that_of_its_first_micro_batch() -> None:
    world = streaming()
    close(world, 0, 2)
    world.change(batch_groups=9, micro_batch_groups=0, equal_shards=True, batch_tokens=1)
    assert (close(world, 1, 2).final, close(world, 2, 2).final) == (False, True)
    world.change(equal_shards=False)
    assert close(world, 0, 9).total_groups == 1, "the next one is whole, by tokens"


def test_n_of_a_streamed_step_may_exceed_the_queue() -> None:
    world = streaming(max_queued_groups=6)
    world.queue(2)
    assert not world.batch(world_size=2, batch_groups=7).final
    assert [close(world, micro_batch, 2).final for micro_batch in (1, 2)] == [False, False]
    assert close(world, 3, 1).total_groups == 7
    with pytest.raises(InvalidField, match="1 to 65536"):
        world.pull(world_size=2, batch_groups=65_537)


def test_later_micro_batches_do_not_look_at_n() -> None:
    world = streaming()
    close(world, 0, 2)
    world.queue(2)
    assert not world.batch(micro_batch=1, world_size=2, batch_groups=0).final


def test_the_last_micro_batch_has_what_is_left() -> None:
    world = streaming(batch_groups=5, micro_batch_groups=2)
    assert close(world, 0, 4).total_groups == 4
    last = close(world, 1, 1)
    assert (last.final, last.total_groups) == (True, 5)


def test_a_micro_batch_must_fit_the_queue() -> None:
    world = World(batch_groups=9, micro_batch_groups=3, max_queued_groups=7)
    world.change(max_queued_groups=8)
    with pytest.raises(InvalidField, match="at most 2 ranks"):
        world.pull(world_size=3)
    world.change(max_queued_groups=7)
    with pytest.raises(InvalidField) as refused:
        world.pull(world_size=3)
    assert refused.value.attributes["field"] == "world_size"
    assert refused.value.attributes["limit"] == (
        "at most 2 ranks: a micro-batch of world_size * micro_batch_groups groups must fit max_queued_groups"
    )
    assert close(world, 0, 6).total_groups == 6


def test_equal_numbers_need_a_step_that_can_be_divided() -> None:
    world = streaming(equal_shards=True, batch_tokens=1_000)
    with pytest.raises(InvalidField, match="a divisor of batch_groups 6"):
        world.pull(world_size=4)
    shard = close(world, 0, 3, world_size=3).shard
    assert len(shard) == 1


# ── versions and staleness ──


def test_all_micro_batches_train_with_the_version_of_the_first() -> None:
    world = streaming()
    world.publish(2)
    world.queue(2)
    assert world.batch(world_size=2, train_version=3).train_version == 3
    world.publish(5)
    with pytest.raises(InvalidField) as refused:
        world.pull(micro_batch=1, world_size=2, train_version=5)
    assert refused.value.attributes == {
        "field": "train_version",
        "value": "5",
        "limit": "3, that of the step's first micro-batch",
    }
    assert close(world, 1, 2, head=5).train_version == 3
    world.queue(2)
    assert world.batch(micro_batch=2, world_size=2, train_version=3).train_version == 3
    assert close(world, 0, 2).train_version == 5


def test_later_micro_batches_are_gated_for_the_version_of_the_step() -> None:
    world = streaming(max_staleness=1)
    close(world, 0, 2)
    world.publish(2)
    assert close(world, 1, 2, head=0).total_groups == 4
    assert close(world, 2, 2, head=0).final
    world.queue(2, head=0)
    assert isinstance(world.pull(world_size=2), ops.Short)
    assert world.groups("dropped_stale") == 2


def test_staleness_adds_up_over_the_micro_batches() -> None:
    world = streaming()
    world.publish(3)
    first = close(world, 0, 2, head=1)
    second = close(world, 1, 2, head=3)
    third = close(world, 2, 2, head=0)
    assert [(one.staleness_sum, one.staleness_max) for one in (first, second, third)] == [(4, 2), (4, 2), (10, 3)]
    assert (world.statistic("staleness_sum"), world.statistic("assembled_groups")) == (10, 6)


# ── what else counts ──


def test_closed_micro_batches_count_for_lookahead() -> None:
    world = streaming(max_lookahead=0)
    world.submit(*"abcdefgh")
    leased = world.lease(8).grants
    assert len(leased) == 6
    for grant in leased:
        world.push(grant)
    world.batch(world_size=2)
    assert world.lease(8).wait is ops.LeaseWait.AT_CAPACITY


def test_shares_hold_over_micro_batches() -> None:
    world = streaming(batch_groups=4, environments=shares(a=3, b=1))
    for name in ("a1", "a2", "a3", "b1", "b2"):
        world.push(name, environment=name[0])
    names = [
        world.names(0, micro_batch=micro_batch, rank=rank, world_size=2) for micro_batch in (0, 1) for rank in (0, 1)
    ]
    assert sorted(name[0] for part in names for name in part) == ["a", "a", "a", "b"]


def test_closed_micro_batches_are_repeated_while_the_run_is_paused_and_no_more_close() -> None:
    world = streaming(max_attempts=1, failure_budget=0)
    world.submit("a")
    first = close(world, 0, 4)
    world.fail_for_good()
    assert world.batch(micro_batch=0, world_size=2).shard == first.shard
    with pytest.raises(FailureBudgetExceeded):
        world.pull(micro_batch=1, world_size=2)


# ── lost groups ──


def test_a_lost_group_of_an_open_step_is_made_up_for_by_a_later_micro_batch() -> None:
    world = streaming(batch_groups=4)
    world.submit("a")
    world.push(world.lease_one())
    first = close(world, 0, 1)
    assert [group.group_id for group in first.shard] == ["a/0"]
    world.lose(0, "a/0")
    assert (states(world), world.groups("lost"), world.tasks("pending")) == ((0, 1, 0), 1, 1)
    again = world.batch(micro_batch=0, world_size=2)
    assert (again.shard, again.total_groups, again.staleness_sum) == ([], 1, 0)
    assert not close(world, 1, 2).final
    last = close(world, 2, 1)
    assert (last.final, last.total_groups) == (True, 4)
    assert world.lease_one().lease_id == "a/1/1"


def test_a_lost_group_of_an_open_step_frees_lookahead() -> None:
    world = streaming(batch_groups=2, max_lookahead=0)
    world.submit("a", "b", "c")
    first, _ = world.lease(2).grants
    world.push(first)
    world.batch()
    assert world.lease().wait is ops.LeaseWait.AT_CAPACITY
    world.lose(0, "a/0")
    assert world.lease_one().lease_id == "a/1/1"


def test_a_step_larger_than_the_policys_has_lookahead_for_all_its_groups() -> None:
    world = streaming(batch_groups=4, max_lookahead=1)
    world.submit(*"abcdefghij")
    for grant in world.lease(10).grants:
        world.push(grant)
    assert world.batch(world_size=2, batch_groups=8).total_groups == 2
    for micro_batch in (1, 2, 3):
        assert world.batch(0, micro_batch=micro_batch, world_size=2).total_groups == 2 * (micro_batch + 1)
    assert world.view.next_step == 1


def test_a_lost_group_of_a_complete_step_is_out_of_all_later_totals() -> None:
    world = streaming(batch_groups=4)
    lost = close(world, 0, 2).shard[0].group_id
    close(world, 1, 2)
    world.lose(0, lost)
    assert [world.batch(0, micro_batch=micro_batch, world_size=2).total_groups for micro_batch in (0, 1)] == [1, 3]
    assert world.view.next_step == 1
    world.commit(0)
    assert world.groups("trained") == 3


def test_equal_numbers_after_a_loss_are_as_equal_as_they_can_be() -> None:
    world = streaming(batch_groups=4, equal_shards=True)
    lost = close(world, 0, 2).shard[0].group_id
    world.lose(0, lost)
    close(world, 1, 2)
    assert close(world, 2, 1).final
