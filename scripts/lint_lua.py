"""Runs luacheck on the expanded scripts of a folder.

A script includes whole pieces and uses a part of each, so an unused local counts only if it is unused in every script
that holds its line; every other warning counts at once.

usage: lint_lua.py FOLDER
"""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

WARNING = re.compile(r"(?P<path>[^:]+):(?P<line>\d+):\d+: \((?P<code>[EW]\d+)\) (?P<text>.*)")
UNUSED_LOCAL = "W211"


def main(folder: Path) -> int:
    """Prints what luacheck found; returns the number of findings, or luacheck's status if it could not run."""
    lines = {str(path): path.read_text().splitlines() for path in sorted(folder.rglob("*.lua"))}
    if not lines:
        print(f"lint_lua: no Lua script in {folder}", file=sys.stderr)
        return 2
    command = ["luacheck", "--formatter", "plain", "--codes", *lines]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    # 0 clean, 1 warnings, 2 errors in the scripts; above that luacheck itself failed.
    if checked.returncode > 2:
        print(checked.stdout + checked.stderr, file=sys.stderr)
        return checked.returncode

    holders: dict[str, set[str]] = defaultdict(set)
    for path, texts in lines.items():
        for text in texts:
            holders[text].add(path)
    findings: list[str] = []
    unused: dict[tuple[str, str], list[str]] = defaultdict(list)
    for output in checked.stdout.splitlines():
        match = WARNING.match(output)
        if match is None:
            findings.append(output)
        elif match["code"] == UNUSED_LOCAL:
            unused[lines[match["path"]][int(match["line"]) - 1], match["text"]].append(output)
        else:
            findings.append(output)
    for (text, _), outputs in unused.items():
        if len({output.split(":", 1)[0] for output in outputs}) == len(holders[text]):
            findings.append(outputs[0])
    print("\n".join([*findings, f"lint_lua: {len(findings)} findings in {len(lines)} scripts"]))
    return len(findings)


if __name__ == "__main__":
    sys.exit(min(main(Path(sys.argv[1])), 1))
