"""Tables that commands write into pages, between comments `<!-- NAME -->` and `<!-- /NAME -->`, and files of rows."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
DOCS = _ROOT / "docs"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Lines of a Markdown table; the first column is text, the others are numbers."""
    lines = [" | ".join(map(str, row)) for row in (head, *rows)]
    return [f"| {lines[0]} |", "|---" + "|---:" * (len(head) - 1) + "|", *(f"| {line} |" for line in lines[1:])]


def put(name: str, lines: Sequence[str]) -> Path | None:
    """Replace what stands between the comments of `name`, on the page of docs that has them or in README; that page."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    for page in (*sorted(DOCS.glob("*.md")), _ROOT / "README.md"):
        text = page.read_text()
        if begin in text and end in text:
            page.write_text("\n".join([text.split(begin, 1)[0] + begin, *lines, end + text.split(end, 1)[1]]))
            return page
    return None


def write_rows(path: Path, values: Mapping[str, Any]) -> None:
    """Write results as JSON: what is a list, an item a line, so that a change of one is a line."""
    entries = [f"{json.dumps(name)}: {_lines(value)}" for name, value in values.items()]
    path.write_text("{\n" + ",\n".join(entries) + "\n}\n")


def _lines(value: object) -> str:
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n" + ",\n".join(f" {json.dumps(item)}" for item in value) + "\n]"
