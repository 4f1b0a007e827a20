"""The lint of the pages' sentences finds those that are too long, and where they begin."""

from pathlib import Path

import pytest

from scripts.lint_prose import MAX_WORDS, main, sentences

SHORT = "word " * (MAX_WORDS - 1) + "end."
LONG = "word " * MAX_WORDS + "end."


def found(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, name: str = "page.md") -> list[str]:
    """Return what the lint prints about a page, without its last line and the page's folder."""
    page = tmp_path / name
    page.write_text(text)
    count = main([page])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"lint_prose: {count} findings in 1 files"
    assert len(lines) == count + 1
    return [line.removeprefix(f"{tmp_path}/") for line in lines[:-1]]


def test_a_planted_long_sentence_is_named_with_its_page_and_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"# Title\n\n{SHORT}\n{SHORT} Then\n{LONG}\n"
    assert found(tmp_path, capsys, text) == [f"page.md:4: 27 words, 25 at most: Then {LONG}"]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(f"{SHORT} {SHORT}\n\n- {SHORT}\n- {SHORT}\n", id="sentences of the length allowed"),
        pytest.param(f"```text\n{LONG}\n```\n", id="block of code"),
        pytest.param(f"Run `{LONG}` now.\n", id="span of code"),
        pytest.param(f"Read [this](page.md#{'-'.join(['word'] * 30)}).\n", id="target of a link"),
        pytest.param("| a b |" * 30 + "\n", id="cells of a table"),
        pytest.param(f"**{SHORT}** {SHORT}\n", id="an end in bold"),
    ],
)
def test_what_is_not_one_long_sentence_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert found(tmp_path, capsys, text) == []


@pytest.mark.parametrize(
    ("text", "line"),
    [
        pytest.param(f"> {SHORT}\n> {LONG}\n", 2, id="quotation"),
        pytest.param(f"| name | {LONG} |\n", 1, id="cell of a table"),
        pytest.param(f"- item\n- {LONG}\n", 2, id="list item"),
        pytest.param(f"```\ncode\n```\n{LONG}\n", 4, id="after a block of code"),
        pytest.param(f"Run `a\nb`. {LONG}\n", 2, id="after a span of code over two lines"),
    ],
)
def test_long_sentences_are_found_in_every_kind_of_block(text: str, line: int) -> None:
    assert [sentence.line for sentence in sentences(text) if sentence.words > MAX_WORDS] == [line]


def test_docstrings_that_say_nothing_alone_or_go_on_too_long_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    constant = 'LIMIT = 3\n"""Of a batch: at most so many."""'
    function = f'def work():\n    """Work.\n\n    {LONG}\n    """'
    module = f'"""Module."""\n\n{constant}\n\n\n{function}\n'
    assert found(tmp_path, capsys, module, "module.py") == [
        "module.py:4: a docstring begins with a noun or a verb: Of a batch: at most so many.",
        f"module.py:10: 26 words, 25 at most: {LONG}",
    ]
