from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tests.oracle.rules.stride import STRIDE, Stride


def sequence(shares: dict[str, int], picks: int, turns: Stride | None = None) -> str:
    turns = turns or Stride()
    chosen = []
    for _ in range(picks):
        name = turns.choose(shares)
        assert name is not None
        turns.take(name, shares[name])
        chosen.append(name)
    return "".join(chosen)


def test_the_exact_sequence_of_three_shares() -> None:
    assert sequence({"a": 3, "b": 2, "c": 1}, 12) == "abcabaabcaba"


def test_equal_shares_take_turns_by_name() -> None:
    assert sequence({"b": 1, "c": 1, "a": 1}, 6) == "abcabc"


def test_names_are_compared_by_their_bytes() -> None:
    assert sequence({"\U0001f600": 1, "\uffff": 1}, 1) == "\uffff", "in UTF-16 the order is the other one"


def test_who_had_nothing_for_a_while_does_not_catch_up() -> None:
    turns = Stride()
    sequence({"a": 1}, 100, turns)
    assert Counter(sequence({"a": 1, "b": 1}, 10, turns)) == {"a": 5, "b": 5}


def test_a_share_that_changes_counts_from_the_next_pick() -> None:
    turns = Stride()
    sequence({"a": 1, "b": 1}, 10, turns)
    assert Counter(sequence({"a": 9, "b": 1}, 100, turns))["a"] in {89, 90, 91}


def test_nobody_is_chosen_of_nobody() -> None:
    assert Stride().choose([]) is None


def test_choosing_takes_no_turn() -> None:
    turns = Stride()
    assert turns.choose(["a", "b"]) == turns.choose(["a", "b"]) == "a"
    assert turns == Stride()


def test_a_copy_leaves_the_original_alone() -> None:
    turns = Stride()
    turns.take("a", 1)
    copy = turns.copy()
    copy.take("b", 1)
    copy.take("b", 1)
    assert turns == Stride(0, {"a": STRIDE})


@given(st.dictionaries(st.sampled_from("abcde"), st.integers(min_value=1, max_value=50), min_size=1))
def test_each_gets_its_share_within_one_pick_per_environment(shares: dict[str, int]) -> None:
    picks = 20 * sum(shares.values())
    got = Counter(sequence(shares, picks))
    for name, share in shares.items():
        assert abs(got[name] - 20 * share) <= len(shares)
