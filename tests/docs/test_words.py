"""Tests of the list of retired words: what is found of them in a text, and what is left alone."""

import pytest

from scripts.lint_words import findings


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("def of(epoch: int)", "epoch"),
        ("class StaleEpoch", "epoch"),
        ("G_EPOCH = 4", "epoch"),
        ("local first_round = 0", "round"),
        ("for micro in session.rounds():", "round"),
        ("A round closes.", "round"),
        ("to_continuation(samples)", "continuation"),
        ("lease_id is task_id/generation/attempt", "generation"),
        ("class _Line:", "line"),
    ],
)
def test_a_retired_word_is_found_in_every_spelling(text: str, word: str) -> None:
    (complaint,) = findings("a.py", text, set())
    assert complaint.startswith(f"a.py:1: {word} is ")


@pytest.mark.parametrize(
    "text",
    [
        "round(0.5)",
        "One more round trip.",
        "turn it around in the background",
        "seconds since the epoch",
        "generation_s",
    ],
)
def test_other_meanings_are_left_alone(text: str) -> None:
    assert not list(findings("a.py", text, set()))


def test_an_allowed_word_counts_as_used() -> None:
    used: set[tuple[str, str]] = set()
    assert not list(findings("docs/collation.md", "an epoch over the data", used))
    assert used == {("epoch", "docs/collation.md")}
