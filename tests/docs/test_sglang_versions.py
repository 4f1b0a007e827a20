"""The tables of docs that say which SGLang is driven are those of the code."""

from pathlib import Path

from rollout_workers.engine.sglang.versions import HABITS, LEAST, OPTION, text

DOCS = Path(__file__).parents[2] / "docs"


def test_habits_are_listed_as_the_code_has_them() -> None:
    page = (DOCS / "engines.md").read_text()
    section = page.partition("## Versions of SGLang")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| 0.")]
    fate = {True: "refused", False: "warned of"}
    assert rows == [f"| {text(h.since)} | {h.what} | {h.before} | {fate[h.needed]} |" for h in HABITS]
    assert OPTION in section


def test_the_least_version_is_named_where_readers_look_for_it() -> None:
    row = next(line for line in (DOCS / "compatibility.md").read_text().splitlines() if line.startswith("| SGLang |"))
    assert f"{text(LEAST)} or newer" in row
    assert f"[{text(LEAST)} or newer](#versions-of-sglang)" in (DOCS / "engines.md").read_text()
