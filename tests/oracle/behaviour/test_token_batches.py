"""Batches by a token budget, in equal numbers per rank, and of another N than the policy's."""

import pytest

from buffer_service.domain import ops
from buffer_wire.errors import InvalidField
from tests.oracle.behaviour.world import World, shares


def push(world: World, *tokens: int) -> None:
    """Groups g0, g1, ... of these sizes."""
    for size in tokens:
        world.push(f"g{world.tasks('submitted')}", tokens=size)


def taken(batch: ops.Batch) -> list[int]:
    return [int(group.group_id[1:].removesuffix("/0")) for group in batch.shard]


# ── token budget ──


def test_a_batch_is_ready_with_enough_tokens_and_stops_before_it_has_too_many() -> None:
    world = World(batch_groups=5, max_queued_groups=9, batch_tokens=100)
    push(world, 40, 30)
    short = world.pull()
    assert isinstance(short, ops.Short)
    assert (short.queued, short.needed) == (2, 5)
    push(world, 40)
    batch = world.batch()
    assert (taken(batch), batch.total_tokens, batch.queued) == ([0, 1], 70, 1)


def test_a_budget_that_is_met_exactly_is_used_up() -> None:
    world = World(batch_groups=5, max_queued_groups=9, batch_tokens=100)
    push(world, 60, 40, 1)
    assert taken(world.batch()) == [0, 1]


def test_a_batch_is_ready_with_enough_groups_whatever_their_tokens() -> None:
    world = World(batch_groups=2, max_queued_groups=9, batch_tokens=100)
    push(world, 10, 10, 10)
    assert taken(world.batch()) == [0, 1]


def test_a_group_above_the_budget_is_a_batch_of_its_own() -> None:
    world = World(batch_groups=5, max_queued_groups=9, batch_tokens=100)
    push(world, 150, 10)
    assert taken(world.batch()) == [0]


def test_a_group_that_was_not_taken_after_all_cost_its_environment_no_turn() -> None:
    world = World(batch_groups=5, max_queued_groups=9, batch_tokens=100, environments=shares(a=1, b=1))
    for name, tokens in (("a1", 60), ("b1", 60), ("b2", 10)):
        world.push(name, tokens=tokens, environment=name[0])
    assert world.names() == ["a1/0"]
    world.push("a2", tokens=60, environment="a")
    assert world.names() == ["b1/0"], "it is still b's turn"


# ── equal numbers ──


def test_every_rank_gets_the_same_number_of_groups() -> None:
    world = World(batch_groups=4, max_queued_groups=4, equal_shards=True)
    push(world, 90, 10, 10, 10)
    shards = [taken(world.batch(0, rank=rank, world_size=2)) for rank in range(2)]
    assert shards == [[0, 3], [1, 2]]


def test_a_batch_that_cannot_be_divided_is_refused_at_once() -> None:
    world = World(batch_groups=4, equal_shards=True, max_staleness=0)
    world.queue(4)
    before = world.view
    with pytest.raises(InvalidField) as refused:
        world.pull(world_size=3, train_version=9)
    assert refused.value.attributes == {
        "field": "world_size",
        "value": "3",
        "limit": "a divisor of batch_groups 4 (equal_shards)",
    }
    assert world.view == before, "nothing was evicted either"


def test_with_a_budget_the_number_is_cut_to_what_can_be_divided() -> None:
    world = World(batch_groups=9, max_queued_groups=9, batch_tokens=100, equal_shards=True)
    push(world, 30, 30, 30, 30)
    batch = world.batch(world_size=2)
    assert (batch.total_groups, batch.queued) == (2, 2)
    push(world, 40)
    assert sorted(taken(world.batch(1, rank=0, world_size=2)) + taken(world.batch(1, rank=1, world_size=2))) == [2, 3]


def test_what_is_cut_off_cost_no_turn() -> None:
    world = World(
        batch_groups=9, max_queued_groups=9, batch_tokens=100, equal_shards=True, environments=shares(a=1, b=1)
    )
    for name in ("a1", "b1", "a2", "a3", "b2"):
        world.push(name, tokens=30, environment=name[0])
    batch = world.batch(world_size=2)
    assert (batch.total_groups, batch.queued) == (2, 3)
    world.change(batch_groups=1, batch_tokens=0, equal_shards=False)
    assert world.names(world_size=2) == ["a2/0"]


def test_with_a_budget_every_rank_gets_one_group_at_least() -> None:
    world = World(batch_groups=3, max_queued_groups=9, batch_tokens=100, equal_shards=True)
    push(world, 90, 90)
    assert isinstance(world.pull(world_size=3), ops.Short), "enough tokens, one group too few"
    push(world, 90)
    batch = world.batch(world_size=3)
    assert (batch.total_groups, batch.total_tokens) == (3, 270)


def test_more_ranks_than_groups_of_a_batch_are_refused() -> None:
    world = World(batch_groups=2, batch_tokens=100, equal_shards=True)
    with pytest.raises(InvalidField) as refused:
        world.pull(world_size=3)
    assert refused.value.attributes == {
        "field": "world_size",
        "value": "3",
        "limit": "at most batch_groups 2 (equal_shards)",
    }


def test_a_replay_for_another_world_size_is_as_equal_as_it_can_be() -> None:
    world = World(batch_groups=4, equal_shards=True)
    push(world, 90, 10, 10, 10)
    world.batch(world_size=2)
    world.resume(0)
    assert [len(taken(world.batch(0, rank=rank, world_size=3))) for rank in range(3)] == [1, 2, 1]
    world.resume(0)
    world.change(equal_shards=False)
    assert [taken(world.batch(0, rank=rank, world_size=2)) for rank in range(2)] == [[0, 3], [1, 2]], "as it began"


# ── another N ──


def test_the_trainer_may_change_n_from_step_to_step() -> None:
    world = World(batch_groups=2, max_queued_groups=6)
    push(world, *[10] * 6)
    assert taken(world.batch(batch_groups=1)) == [0]
    assert taken(world.batch(batch_groups=3)) == [1, 2, 3]
    assert taken(world.batch()) == [4, 5]


def test_the_n_of_a_pull_is_what_it_waits_for() -> None:
    world = World(batch_groups=1, max_queued_groups=6)
    push(world, 10)
    short = world.pull(batch_groups=2)
    assert isinstance(short, ops.Short)
    assert short.needed == 2


@pytest.mark.parametrize("n", [0, 7])
def test_n_must_fit_the_queue(n: int) -> None:
    world = World(batch_groups=2, max_queued_groups=6)
    with pytest.raises(InvalidField) as refused:
        world.pull(batch_groups=n)
    assert refused.value.attributes == {"field": "batch_groups", "value": str(n), "limit": "1 to 6"}


def test_the_n_of_a_stored_step_is_not_looked_at() -> None:
    world = World(batch_groups=2)
    push(world, 10, 10)
    world.batch()
    assert world.batch(0, batch_groups=999).total_groups == 2


def test_the_n_of_a_pull_must_be_divided_by_the_ranks_too() -> None:
    world = World(batch_groups=4, equal_shards=True, max_queued_groups=9)
    with pytest.raises(InvalidField, match="a divisor of batch_groups 5"):
        world.pull(world_size=2, batch_groups=5)


def test_a_whole_batch_has_one_micro_batch() -> None:
    world = World(batch_groups=1, max_queued_groups=2)
    push(world, 10, 10)
    batch = world.batch()
    assert (batch.micro_batch, batch.final) == (0, True)
    with pytest.raises(InvalidField) as refused:
        world.pull(0, micro_batch=1)
    assert refused.value.attributes == {
        "field": "micro_batch",
        "value": "1",
        "limit": "below 1, the micro-batches of step 0",
    }
    with pytest.raises(InvalidField) as refused:
        world.pull(1, micro_batch=1)
    assert refused.value.attributes == {
        "field": "micro_batch",
        "value": "1",
        "limit": "at most 0, the next micro-batch of step 1",
    }


def test_no_pull_asks_for_more_groups_than_one_decision_should_take() -> None:
    world = World(batch_groups=2, max_queued_groups=1_000_000)
    assert isinstance(world.pull(batch_groups=65_536), ops.Short)
    with pytest.raises(InvalidField, match="1 to 65536"):
        world.pull(batch_groups=65_537)
