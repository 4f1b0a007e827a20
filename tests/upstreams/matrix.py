"""The matrix of upstreams in docs/compatibility.md: tests of each adapter, run against its checkout or wheels.

python -m tests.upstreams.matrix [ROW ...]     (make compatibility ROWS='trl miles' MILES_SRC=…)

Rows by `tests.support.upstreams.UPSTREAMS`, all of them where none is named. A row that cannot be run, because no
checkout is named, keeps what it says, with the date of that run; one that never ran says so. Ends with 1 if a test
failed.
"""

import datetime as dt
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

from bench.tables import DOCS, put
from tests.support.upstreams import UPSTREAMS, Upstream, commit_of

ROOT = DOCS.parent
MARK = "upstreams"
HEAD = ("upstream", "version or commit", "what is run", "result", "run on")
NEVER = "–"
FAILED = "FAILED"
LIMIT_S = 3600
"""Limit in seconds for one row, the installation of its environment included."""


def rows() -> dict[str, list[str]]:
    """Return the cells of each row in the page by its upstream's title."""
    text = (DOCS / "compatibility.md").read_text().split(f"<!-- {MARK} -->", 1)[1].split(f"<!-- /{MARK} -->", 1)[0]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {row[0]: row for row in cells}


def tested(upstream: Upstream) -> str:
    """Return the versions of the wheels in the upstream's environment, or the commit of its checkout."""
    if upstream.variable:
        return commit_of(Path(os.environ[upstream.variable]).resolve())
    program = "import sys; from importlib.metadata import version; print(', '.join(map(version, sys.argv[1:])))"
    command = [str(ROOT / upstream.environment / "bin/python"), "-c", program, *upstream.wheels]
    if not (ROOT / upstream.environment / ".installed").exists():
        return "not installed"
    versions = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().split(", ")
    return ", ".join(f"{wheel} {version}" for wheel, version in zip(upstream.wheels, versions, strict=True))


def outcome(report: Path) -> str:
    """Return how many tests passed, failed and were skipped, by pytest's report in JUnit's form.

    Tests that need another upstream's checkout are not this row's.
    """
    passed = failed = skipped = 0
    for case in ET.parse(report).iter("testcase"):
        skip = case.find("skipped")
        if skip is not None:
            skipped += "no checkout of" not in skip.get("message", "")
        elif case.find("failure") is None and case.find("error") is None:
            passed += 1
        else:
            failed += 1
    counts = {"passed": passed, "skipped": skipped}
    if failed or not passed:
        counts = {FAILED: failed, **counts}
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count or name == FAILED)


def run(upstream: Upstream) -> list[str]:
    """Run the tests of a row with its checkout alone, by its target of make; return its cells."""
    others = {each.variable for each in UPSTREAMS}
    around = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name not in others}
    if upstream.variable:
        around[upstream.variable] = os.environ[upstream.variable]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = ["make", upstream.target, f"PYTEST_ARGS=-q -p no:cacheprovider --junitxml={report}"]
        command += [f"UPSTREAM_TESTS={' '.join(upstream.tests)}"] if upstream.tests else []
        ended = subprocess.run(command, cwd=ROOT, env=around, timeout=LIMIT_S, check=False).returncode
        result = outcome(report) if report.exists() else f"{FAILED}: make {upstream.target} ended with {ended}"
    today = dt.datetime.now(tz=dt.UTC).date().isoformat()
    return [upstream.title, tested(upstream), upstream.seam, result, today]


def told(upstream: Upstream, why: str) -> list[str]:
    """Return the cells of a row that is not run, for the reason `why`: what the page says, or that it never was run."""
    never = [upstream.title, NEVER, upstream.seam, f"not run: {why}", NEVER]
    cells = rows().get(upstream.title, never)
    return never if cells[-1] == NEVER else cells


def write(changed: dict[str, list[str]]) -> list[str]:
    """Write the table, with `changed` cells by title over what the page says by now; return its lines."""
    cells = rows() | changed
    lines = [f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
    titles = [upstream.title for upstream in UPSTREAMS]
    lines += [f"| {' | '.join(cells[title])} |" for title in titles if title in cells]
    put(MARK, lines)
    return lines


def main(wanted: list[str]) -> int:
    """Run the rows that are wanted and can be run, and write each when it is known."""
    names = [upstream.name for upstream in UPSTREAMS]
    if unknown := sorted(set(wanted) - set(names)):
        print(f"compatibility: no rows {', '.join(unknown)}; rows are {', '.join(names)}", file=sys.stderr)
        return 2
    lines: list[str] = []
    results: list[str] = []
    for upstream in UPSTREAMS:
        named = not upstream.variable or bool(os.environ.get(upstream.variable))
        if named and (not wanted or upstream.name in wanted):
            print(f"compatibility: {upstream.title}", flush=True)
            cells = run(upstream)
            results.append(cells[3])
        else:
            why = "it was not asked for" if named else f"{upstream.variable} names no checkout"
            cells = told(upstream, why)
            print(f"compatibility: {upstream.title} is not run, {why}; the row says: {cells[3]}", flush=True)
        lines = write({upstream.title: cells})
    print("\n".join(lines))
    return int(any(FAILED in result for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
