"""Finds the sentences of Markdown pages and of docstrings that are too long to be read at once, and riddles.

A sentence has at most 25 words. A full stop, a question or exclamation mark, a colon or a semicolon ends it. So does
the end of its paragraph, list item, heading or table cell. A span of code counts as one word, and so do several with
nothing but commas between them; the target of a link and HTML tags count as none; blocks of code are not read.
Generated pages are read like the others: what is too long there is put right in the comment or the description that the
page is written from.

A docstring, also one below an assignment, begins with a noun or a verb: one that begins with a word like "What" or "Of"
says nothing without its neighbours.

usage: lint_prose.py PAGE_OR_MODULE...
"""

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

MAX_WORDS = 25
_FENCE = re.compile(r"\s*(```|~~~)")
_STARTS_BLOCK = re.compile(r"\s*([-*+]|\d+\.)\s|#|\s*\|")
_NOT_PROSE = (
    (re.compile(r"(`+).+?\1", re.DOTALL), "`code`"),
    (re.compile(r"`code`(,\s+`code`)+"), "`code`"),
    (re.compile(r"\]\([^()]*(\([^()]*\)[^()]*)*\)"), "]"),
    (re.compile(r"</?\w[^<>]*>|<!--.*?-->", re.DOTALL), ""),
)
_RIDDLES = frozenset(
    [
        *("Also", "As", "By", "For", "From", "How", "In", "Of", "Until", "What", "When", "Where", "Whether", "Which"),
        *("Who", "Whose", "Why", "With", "Those who", "Those that", "One of", "All of", "Most of", "The same"),
    ]
)
_INDENTED = re.compile(r"^(    | *[├│└]).*$", re.MULTILINE)
_WORD = re.compile(r"\w[\w'’.,-]*")
_END = re.compile(r"[.!?:;][)\]\"”*_]*\s+|\Z")


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence, the line that it begins on (from 1), and its number of words."""

    line: int
    text: str
    words: int


def sentences(page: str) -> Iterator[Sentence]:
    """Sentences of a Markdown page, in order."""
    for first_line, block in _blocks(page):
        prose = block
        for pattern, instead in _NOT_PROSE:
            prose = pattern.sub(partial(_replaced, instead), prose)
        start = 0
        while start < len(prose):
            end = _END.search(prose, start).end()  # type: ignore[union-attr]  # \Z is always found.
            text = prose[start:end]
            before = prose[:start] + text[: len(text) - len(text.lstrip())]
            yield Sentence(first_line + before.count("\n"), " ".join(text.split()), len(_WORD.findall(text)))
            start = end


def _replaced(instead: str, match: re.Match[str]) -> str:
    """Replacement for what is not prose; keeps its newlines, by which the lines of later sentences are counted."""
    return instead + "\n" * match[0].count("\n")


def _blocks(page: str) -> Iterator[tuple[int, str]]:
    """Paragraphs, list items, headings and table cells of a page, each with its first line."""
    fenced = False
    block: list[str] = []
    first = 0
    for number, raw in enumerate([*page.splitlines(), ""], start=1):
        line = re.sub(r"^\s*>\s?", "", raw)
        fence = _FENCE.match(line) is not None
        if block and (fence or fenced or not line.strip() or _STARTS_BLOCK.match(line)):
            yield first, "\n".join(block)
            block = []
        if fence:
            fenced = not fenced
        elif fenced or not line.strip():
            continue
        elif line.lstrip().startswith("|"):
            yield from ((number, cell) for cell in re.split(r"(?<!\\)\|", line))
        else:
            first = first if block else number
            block.append(line)


def docstrings(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Lines and texts of all docstrings of a module, without trees and formulas, which are indented."""
    for node in ast.walk(module):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, _INDENTED.sub("", inspect.cleandoc(node.value.value))


def complaints(page: Path) -> Iterator[str]:
    """Complaints about a page's sentences, or a module's docstrings."""
    text = page.read_text()
    parts = docstrings(ast.parse(text)) if page.suffix == ".py" else [(1, text)]
    for line, part in parts:
        for sentence in sentences(part):
            if sentence.words > MAX_WORDS:
                where = f"{page}:{line + sentence.line - 1}"
                yield f"{where}: {sentence.words} words, {MAX_WORDS} at most: {sentence.text}"
        words = part.split(maxsplit=2)
        if page.suffix == ".py" and (words[0] in _RIDDLES or " ".join(words[:2]) in _RIDDLES):
            yield f"{page}:{line}: a docstring begins with a noun or a verb: {part.splitlines()[0]}"


def main(pages: list[Path]) -> int:
    """Prints what is wrong; returns how much there is."""
    found = [complaint for page in pages for complaint in complaints(page)]
    print("\n".join([*found, f"lint_prose: {len(found)} findings in {len(pages)} files"]))
    return len(found)


if __name__ == "__main__":
    sys.exit(min(main([Path(page) for page in sys.argv[1:]]), 1))
