"""Markdown as the tests of the docs need it: pages, their links and anchors, and the code in their fences."""

import re
import shlex
import subprocess
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+)(?P<language>\S*)\s*$")
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\((?P<target>[^()\s]+(?:\([^()]*\))?)\)")
_CODE = re.compile(r"`[^`]*`")


@dataclass(frozen=True, slots=True)
class Block:
    """One fence: its language and text, and the line at which the text begins, from 1."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        """page:line, for messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@cache
def pages() -> tuple[Path, ...]:
    """Every Markdown page of the project, those not committed yet included, in order."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"],
        capture_output=True,
        check=True,
        text=True,
    )
    return tuple(sorted({ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}))


def blocks(page: Path) -> Iterator[Block]:
    """The fences of a page, without the indentation that they share."""
    opened: tuple[re.Match[str], int] | None = None
    lines: list[str] = []
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        fence = _FENCE.match(line)
        if opened is None:
            if fence is not None:
                opened, lines = (fence, number + 1), []
        elif fence is not None and fence["ticks"] == opened[0]["ticks"] and not fence["language"]:
            yield Block(page, opened[1], opened[0]["language"], textwrap.dedent("\n".join(lines)) + "\n")
            opened = None
        else:
            lines.append(line)
    if opened is not None:
        raise ValueError(f"{page}:{opened[1]}: a fence that nobody closes")


def text_lines(page: Path) -> Iterator[str]:
    """The lines of a page outside its fences."""
    fenced = False
    for line in page.read_text().splitlines():
        if _FENCE.match(line):
            fenced = not fenced
        elif not fenced:
            yield line


def links(page: Path) -> Iterator[str]:
    """The targets of a page's links and images, as they are written."""
    for line in text_lines(page):
        # Brackets and parentheses within code are none of a link; the text of a link may be code.
        for match in _LINK.finditer(_CODE.sub(lambda code: "x" * len(code[0]), line)):
            yield line[match.start("target") : match.end("target")]


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return what can stand behind # in a link to the page: a heading's words, as GitHub writes them."""
    found: set[str] = set()
    for line in text_lines(page):
        heading = re.match(r"#{1,6} +(.*?) *#*$", line)
        if heading is None:
            continue
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        number = 0
        while (unique := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(unique)
    return frozenset(found)


def inline_code(page: Path) -> Iterator[str]:
    """Code within the sentences of a page."""
    for line in text_lines(page):
        for match in _CODE.finditer(line):
            yield match[0].strip("`")


def shell_words(text: str) -> Iterator[list[str]]:
    """The simple commands of a shell text, one list of words each, without assignments before them and redirections.

    Comments, continued lines, pipes and `&&` are understood; nothing is expanded, and a quote ends in its line.
    """
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line.strip().removeprefix("$ "), posix=True, punctuation_chars=";|&<>")
        lexer.whitespace_split = True
        words: list[str] = []
        redirected = False
        for token in lexer:
            if set(token) & set("<>") and set(token) <= set("<>&"):
                redirected = True
                if words and words[-1].isdigit():
                    words.pop()
            elif set(token) <= set(";|&"):
                if words:
                    yield words
                words, redirected = [], False
            elif redirected:
                redirected = False
            elif words or not re.fullmatch(r"\w+=.*", token):
                words.append(token)
        if words:
            yield words
