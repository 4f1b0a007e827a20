"""Changes of usual kinds touch few files, and an edit that no longer finds its place says what to do."""

import importlib
from pathlib import Path

import pytest

from scripts.planted_changes import CHANGES, Copy, main
from tests.planted.change import Change, DoesNotApply, Edit


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    return Copy(tmp_path_factory.mktemp("tree"))


def change(*edits: Edit, most_files: int = 1, not_in: str = "") -> Change:
    return Change("name", "a title", most_files, edits, (), not_in)


@pytest.mark.parametrize("planted", CHANGES, ids=lambda planted: planted.name)
def test_each_change_applies_to_the_tree_and_touches_few_files(copy: Copy, planted: Change) -> None:
    assert planted.excess() == ""
    copy.plant(planted)
    copy.undo(planted, ())
    importlib.import_module(f"tests.planted.checks.{planted.name}")


def test_a_change_of_more_files_than_it_may_touch_is_too_large() -> None:
    edits = [Edit(path, "") for path in ("buffer_wire/a.py", "proto/b.proto", "docs/c.md", "tests/d.py")]
    assert change(*edits, most_files=2).excess() == ""
    assert change(*edits).excess() == "a title: 2 code files, at most 1: buffer_wire/a.py, proto/b.proto"
    assert "touches proto/b.proto" in change(*edits, most_files=2, not_in="proto/").excess()


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (Edit("a.py", "new", at="gone"), "finds it 0 times"),
        (Edit("a.py", "new", at="twice"), "finds it 2 times"),
        (Edit("b.py", "new", at="x"), "which the tree does not have"),
        (Edit("a.py", "new"), "which the tree has already"),
    ],
)
def test_an_edit_that_does_not_find_its_place_says_what_to_do(tmp_path: Path, edit: Edit, why: str) -> None:
    (tmp_path / "a.py").write_text("twice twice")
    with pytest.raises(DoesNotApply, match=rf"(?s){why}.*Write the edit in tests/planted/name\.py anew"):
        change(edit).apply(tmp_path)


@pytest.mark.parametrize(("where", "text"), [("after", "one 2 two"), ("before", " 2one two"), ("instead", " 2 two")])
def test_text_is_put_after_before_or_instead_of_its_anchor(tmp_path: Path, where: str, text: str) -> None:
    (tmp_path / "a.py").write_text("one two")
    change(Edit("a.py", " 2", at="one", where=where)).apply(tmp_path)  # type: ignore[arg-type]
    assert (tmp_path / "a.py").read_text() == text


def test_the_table_of_counts_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["planted_changes", "--count"])
    assert main() == 0
    assert capsys.readouterr().out.count("\n") == 2 + len(CHANGES)
