"""Runs luacheck on the expanded scripts of a folder, and checks what luacheck cannot know of their libraries.

A script includes whole libraries and uses a part of each. So an unused local or library counts only if it is unused in
every script that holds its line; every other warning counts at once. Libraries are tables whose names begin with a
capital. What a script names of one is defined in it, and each function is used by some script. A script has fewer than
MAX_LOCALS locals of its own and its libraries'. A library has no local but its table, so that what a call knows is in
the `ctx` that it passes.

usage: lint_lua.py FOLDER LIBRARIES
"""

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

WARNING = re.compile(r"(?P<path>[^:]+):(?P<line>\d+):\d+: \((?P<code>[EW]\d+)\) (?P<text>.*)")
UNUSED = {"W211", "W241"}

MAX_LOCALS = 60
"""Lua itself allows 200."""

SHARED = {"keys", "reply"}
"""Libraries that are no tables: what every script says by short names."""

QUOTED_OR_COMMENT = re.compile(r"--.*|'[^'\n]*'|\"[^\"\n]*\"")
LOCALS = re.compile(r"^local (?:function )?(\w+(?:, \w+)*)", re.MULTILINE)
DEFINED = re.compile(r"^(?:function (?=[\w.]+\()|(?=[\w.]+ = ))([A-Z][a-z]\w*\.\w+)", re.MULTILINE)
NAMED = re.compile(r"\b[A-Z][a-z]\w*\.\w+")


def main(folder: Path, libraries: Path) -> int:
    """Prints what was found; returns the number of findings, or luacheck's status if it could not run."""
    texts = {str(path): path.read_text() for path in sorted(folder.rglob("*.lua"))}
    if not texts:
        print(f"lint_lua: no Lua script in {folder}", file=sys.stderr)
        return 2
    command = ["luacheck", "--formatter", "plain", "--codes", *texts]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    # 0 clean, 1 warnings, 2 errors in the scripts; above that luacheck itself failed.
    if checked.returncode > 2:
        print(checked.stdout + checked.stderr, file=sys.stderr)
        return checked.returncode

    findings = [
        *_luacheck_findings(checked.stdout, {path: text.splitlines() for path, text in texts.items()}),
        *_names(texts),
        *_locals(texts, libraries),
    ]
    print("\n".join([*findings, f"lint_lua: {len(findings)} findings in {len(texts)} scripts"]))
    return len(findings)


def _luacheck_findings(output: str, lines: Mapping[str, list[str]]) -> Iterator[str]:
    holders: dict[str, set[str]] = defaultdict(set)
    for path, texts in lines.items():
        for text in texts:
            holders[text].add(path)
    unused: dict[tuple[str, str], list[str]] = defaultdict(list)
    for finding in output.splitlines():
        match = WARNING.match(finding)
        if match and match["code"] in UNUSED:
            unused[lines[match["path"]][int(match["line"]) - 1], match["text"]].append(finding)
        else:
            yield finding
    for (text, _), found in unused.items():
        if len({finding.split(":", 1)[0] for finding in found}) == len(holders[text]):
            yield found[0]


def _names(texts: Mapping[str, str]) -> Iterator[str]:
    """Names of a library that it lacks, and those that nobody uses."""
    unused: set[str] = set()
    used: set[str] = set()
    for path, text in texts.items():
        code = QUOTED_OR_COMMENT.sub("", text)
        defined = DEFINED.findall(code)
        mentions = NAMED.findall(code)
        yield from (f"{path}: {name} is not defined" for name in sorted(set(mentions) - set(defined)))
        yield from (f"{path}: {name} is defined twice" for name in sorted(set(defined)) if defined.count(name) > 1)
        unused |= set(defined)
        used |= {name for name in mentions if mentions.count(name) > 1}
    yield from (f"{name} is used by no script" for name in sorted(unused - used))


def _locals(texts: Mapping[str, str], libraries: Path) -> Iterator[str]:
    for path, text in texts.items():
        count = sum(len(names.split(", ")) for names in LOCALS.findall(text))
        if count >= MAX_LOCALS:
            yield f"{path}: {count} locals; fewer than {MAX_LOCALS} are allowed"
    for library in sorted(libraries.glob("*/*.lua")):
        names = LOCALS.findall(library.read_text())
        if library.stem not in SHARED and names != [library.stem.title().replace("_", "")]:
            yield f"{library}: has locals {', '.join(names)}; its table alone is allowed"


if __name__ == "__main__":
    sys.exit(min(main(Path(sys.argv[1]), Path(sys.argv[2])), 1))
