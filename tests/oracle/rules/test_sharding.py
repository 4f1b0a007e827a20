from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tests.oracle.rules.sharding import shard

GROUPS = st.lists(st.integers(min_value=0, max_value=1_000), max_size=40).map(lambda sizes: list(enumerate(sizes)))
WORLD_SIZES = st.integers(min_value=1, max_value=9)


@given(GROUPS, WORLD_SIZES)
def test_every_group_goes_to_exactly_one_rank_in_order_of_sequence(
    groups: list[tuple[int, int]], world_size: int
) -> None:
    shards = shard(groups, world_size)
    assert len(shards) == world_size
    assert sorted(sequence for sequences in shards for sequence in sequences) == [sequence for sequence, _ in groups]
    assert all(sequences == sorted(sequences) for sequences in shards)


@given(GROUPS, WORLD_SIZES)
def test_no_rank_has_more_than_the_largest_group_above_another(groups: list[tuple[int, int]], world_size: int) -> None:
    tokens = dict(groups)
    loads = [sum(tokens[sequence] for sequence in sequences) for sequences in shard(groups, world_size)]
    assert max(loads) - min(loads) <= max(tokens.values(), default=0)


@given(GROUPS, WORLD_SIZES, st.randoms(use_true_random=False))
def test_the_order_in_which_groups_are_given_does_not_matter(
    groups: list[tuple[int, int]], world_size: int, random: Random
) -> None:
    shuffled = list(groups)
    random.shuffle(shuffled)
    assert shard(shuffled, world_size) == shard(groups, world_size)


def test_longest_first_to_the_emptiest_rank() -> None:
    assert shard([(1, 5), (2, 9), (3, 4), (4, 7)], 2) == [[2, 3], [1, 4]]


def test_groups_of_equal_size_go_by_sequence_to_ranks_in_turn() -> None:
    assert shard([(5, 10), (3, 10), (4, 10), (9, 10)], 3) == [[3, 9], [4], [5]]


def test_groups_without_tokens_are_spread_by_number() -> None:
    assert shard([(1, 0), (2, 0), (3, 0), (4, 0)], 2) == [[1, 3], [2, 4]]


def test_ranks_beyond_the_groups_get_nothing() -> None:
    assert shard([(1, 10)], 3) == [[1], [], []]


@given(GROUPS, WORLD_SIZES)
def test_with_equal_numbers_no_rank_has_more_than_its_part(groups: list[tuple[int, int]], world_size: int) -> None:
    shards = shard(groups, world_size, equal=True)
    assert sorted(sequence for sequences in shards for sequence in sequences) == [sequence for sequence, _ in groups]
    part = -(-len(groups) // world_size)
    assert all(len(sequences) <= part for sequences in shards)
    if len(groups) % world_size == 0:
        assert all(len(sequences) == part for sequences in shards)


def test_equal_numbers_cost_balance() -> None:
    sizes = [(1, 9), (2, 1), (3, 1), (4, 1)]
    assert shard(sizes, 2) == [[1], [2, 3, 4]]
    assert shard(sizes, 2, equal=True) == [[1, 4], [2, 3]]


def test_equal_numbers_of_a_number_that_cannot_be_divided_differ_by_as_much_as_they_must() -> None:
    assert shard([(1, 9), (2, 1), (3, 1)], 2, equal=True) == [[1], [2, 3]]
    assert shard([(1, 9), (2, 1), (3, 1), (4, 1), (5, 1)], 3, equal=True) == [[1], [2, 4], [3, 5]]
