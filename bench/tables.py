"""Tables that commands write into the docs: the lines between two comments `<!-- NAME -->` and `<!-- /NAME -->`."""

from collections.abc import Sequence
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Lines of a Markdown table; the first column is text, the others are numbers."""
    lines = [" | ".join(map(str, row)) for row in (head, *rows)]
    return [f"| {lines[0]} |", "|---" + "|---:" * (len(head) - 1) + "|", *(f"| {line} |" for line in lines[1:])]


def put(page: Path, name: str, lines: Sequence[str]) -> bool:
    """Replace what stands between the comments of `name`; False where the page has none."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    text = page.read_text()
    if begin not in text or end not in text:
        return False
    before, after = text.split(begin, 1)[0], text.split(end, 1)[1]
    page.write_text("\n".join([before + begin, *lines, end + after]))
    return True
