"""A reader gets everywhere: no relative link is dead, and the index leads to every page."""

from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.docs.pages import ROOT, anchors, links, pages

STARTS = (ROOT / "README.md", ROOT / "docs/README.md")


def targets(page: Path) -> list[tuple[str, Path, str]]:
    """Relative links of a page: as written, the file meant, and the anchor."""
    found = []
    for target in links(page):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        found.append((target, (page.parent / unquote(path)).resolve() if path else page, anchor))
    return found


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_no_relative_link_is_dead(page: Path) -> None:
    dead = []
    for written, file, anchor in targets(page):
        if not file.exists() or not file.is_relative_to(ROOT):
            dead.append(written)
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            dead.append(f"{written} (anchors there: {', '.join(sorted(anchors(file)))})")
    assert dead == []


def test_every_page_is_reached_from_the_readme_and_the_index() -> None:
    reached = set(STARTS)
    waiting = list(STARTS)
    while waiting:
        for _, file, _ in targets(waiting.pop()):
            if file.suffix == ".md" and file.exists() and file not in reached:
                reached.add(file)
                waiting.append(file)
    # Notes beside tests are for those who read the tests.
    meant = [page for page in pages() if not page.is_relative_to(ROOT / "tests")]
    assert [str(page.relative_to(ROOT)) for page in meant if page not in reached] == []


def test_the_index_names_every_page_of_docs_itself() -> None:
    named = {file for _, file, _ in targets(ROOT / "docs/README.md")}
    # Decisions have an index of their own.
    own = [page for page in pages() if page.is_relative_to(ROOT / "docs") and page.parent.name != "adr"]
    missing = [str(page.relative_to(ROOT)) for page in own if page not in named and page != ROOT / "docs/README.md"]
    assert missing == []
    assert ROOT / "docs/adr/README.md" in named
