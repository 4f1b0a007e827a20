"""Vocabulary, tasks and reward: everything that needs no model."""

import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from examples.demo import vocabulary
from examples.demo.reward import exact_match
from examples.demo.tasks import MAX_ANSWER_TOKENS, ChainSums


def value_of(prompt: str) -> int:
    """The sum, worked out apart from reasoning-gym."""
    assert re.fullmatch(r"\d+([+-]\d+)+=", prompt)
    return sum(int(term) for term in re.findall(r"[+-]?\d+", prompt))


def test_every_id_of_the_vocabulary_means_one_character() -> None:
    assert vocabulary.VOCAB_SIZE == 64
    assert len(set(vocabulary.TOKENS)) == 64
    ids = vocabulary.encode(vocabulary.ALPHABET)
    assert ids == list(range(2, 64))
    assert vocabulary.decode_answer([*ids, vocabulary.EOS_ID]) == vocabulary.ALPHABET


def test_a_character_outside_the_alphabet_is_named() -> None:
    with pytest.raises(ValueError, match="'Σ'"):
        vocabulary.encode("1Σ2")


def test_answers_are_right_and_fit_the_response_length() -> None:
    tasks = list(islice(ChainSums(seed=3).stream(), 500))
    for task in tasks:
        assert int(task.answer) == value_of(task.prompt)
        assert len(task.answer_ids) <= MAX_ANSWER_TOKENS
    assert len({task.prompt for task in tasks}) > 150, "of 200 expressions"


def test_harder_tasks_have_more_terms_and_digits() -> None:
    tasks = list(islice(ChainSums(seed=3, max_terms=4, max_digits=2).stream(), 200))
    assert all(int(task.answer) == value_of(task.prompt) for task in tasks)
    assert any(len(re.findall(r"\d+", task.prompt)) == 4 for task in tasks)
    assert any(re.search(r"\d\d", task.prompt) for task in tasks)


def test_a_stream_continues_where_its_cursor_stands() -> None:
    whole = list(islice(ChainSums(seed=9).stream(), 40))
    assert list(islice(ChainSums(seed=9).stream(start=25), 15)) == whole[25:]
    assert [task.index for task in whole] == list(range(40))


def test_neighbouring_seeds_are_different_streams() -> None:
    one = [task.prompt for task in islice(ChainSums(seed=1).stream(), 60)]
    two = [task.prompt for task in islice(ChainSums(seed=2).stream(), 60)]
    # reasoning-gym's own seeds would give two == one[1:] + …
    assert all(one[shift : shift + 40] != two[:40] for shift in range(20))


@pytest.mark.parametrize("index", [-1, 1_000_003])
def test_an_index_outside_the_stream_is_refused(index: int) -> None:
    with pytest.raises(IndexError):
        ChainSums(seed=1)[index]


def response(text: str) -> list[int]:
    return [*vocabulary.encode(text), vocabulary.EOS_ID]


def test_only_the_exact_answer_is_rewarded() -> None:
    assert exact_match(response("-2"), "-2") == 1.0
    for text in ("2", "-3", "+2", "-02", "-2 ", " -2", "-2.", "-2=", "-", "", "--2"):
        assert exact_match(response(text), "-2") == 0.0


def test_a_response_that_did_not_end_by_itself_earns_nothing() -> None:
    ids = vocabulary.encode("12")
    assert exact_match(ids, "12") == 0.0
    assert exact_match([], "12") == 0.0


@pytest.mark.parametrize("inside", [vocabulary.PAD_ID, vocabulary.EOS_ID, 64, 5000, -1])
def test_a_token_without_a_character_spoils_the_answer(inside: int) -> None:
    one, two = vocabulary.encode("12")
    assert exact_match([one, two, vocabulary.EOS_ID], "12") == 1.0
    assert exact_match([one, inside, two, vocabulary.EOS_ID], "12") == 0.0
    assert exact_match([one, two, inside, vocabulary.EOS_ID], "12") == 0.0


def test_the_reward_and_the_tasks_load_without_torch() -> None:
    # They run in the worker and the feeder, where torch may be absent.
    code = (
        "import sys, examples.demo.reward, examples.demo.tasks;"
        "sys.exit(bool({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60, check=False)
    assert done.returncode == 0
