"""Counts the files that five planted changes touch, and shows in a copy of the tree that each works and is complete.

The changes are data, in tests/planted/. Each is applied to a temporary copy, what is generated is generated anew, and
its check runs there. Then every file is left out once: the check has to fail. Fails when a change touches more files
than it may, does not apply, does not work, or when a left-out file goes unnoticed.

usage: planted_changes.py [--count] [NAME ...]   (--count: apply and count only; NAME: these changes only)
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

from tests.planted import counter, filter_of_groups, operation, overflow_action, sample_field
from tests.planted.change import GENERATED, Change, DoesNotApply, area

ROOT = Path(__file__).resolve().parent.parent
CHANGES = (
    overflow_action.CHANGE,
    filter_of_groups.CHANGE,
    counter.CHANGE,
    operation.CHANGE,
    sample_field.CHANGE,
)
PROTO_PYTHON = ROOT / ".venv-proto/bin/python"
TEST_LIMIT_S = 300


class Copy:
    """A copy of the tree's tracked and new files, which takes one change at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        listed = _git("ls-files", "--cached", "--others", "--exclude-standard")
        self._files = [name for name in listed if (ROOT / name).is_file()]
        for name in self._files:
            self._restore(name)

    def plant(self, change: Change) -> None:
        """Apply a change to the copy. Raises DoesNotApply."""
        change.apply(self._folder)

    def generate(self) -> list[str]:
        """Write anew what is generated; the files that came out different."""
        self._run([str(self._folder / "scripts/generate_proto.sh"), str(PROTO_PYTHON), "proto"])
        self._run([str(PROTO_PYTHON), "-m", "scripts.protocol_reference"])
        self._run([sys.executable, "-m", "scripts.metrics_reference"])
        self._run([sys.executable, "-m", "scripts.rules_tables"])
        generated = [name for name in self._files if any(fnmatch(name, pattern) for pattern in GENERATED)]
        return [name for name in generated if (self._folder / name).read_bytes() != (ROOT / name).read_bytes()]

    def failures(self, change: Change) -> str:
        """Last lines of the failing tests of a change; empty: all pass."""
        check = f"tests/planted/checks/{change.name}.py"
        ran = self._start([sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", check, *change.tests])
        return "" if ran.returncode == 0 else "\n".join((ran.stdout + ran.stderr).strip().splitlines()[-25:])

    def without(self, change: Change, path: str, regenerated: Sequence[str]) -> str:
        """Failures when one file of a planted change is left out; empty: nobody notices."""
        alone = [path, *regenerated] if path.endswith(".proto") else [path]
        kept = {name: (self._folder / name).read_bytes() for name in alone}
        for name in alone:
            self._restore(name)
        failed = self.failures(change)
        for name, content in kept.items():
            (self._folder / name).write_bytes(content)
        return failed

    def undo(self, change: Change, regenerated: Sequence[str]) -> None:
        """Take a change back."""
        for name in (*change.files, *regenerated):
            self._restore(name)

    def _restore(self, name: str) -> None:
        target = self._folder / name
        if not (ROOT / name).exists():
            target.unlink()
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)

    def _run(self, command: Sequence[str]) -> None:
        ran = self._start(command)
        if ran.returncode:
            raise SystemExit(f"{' '.join(command)} failed in the copy of the tree:\n{ran.stdout}{ran.stderr}")

    def _start(self, command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command, cwd=self._folder, env=self._environment(), capture_output=True, text=True, timeout=TEST_LIMIT_S,
            check=False,
        )  # fmt: skip

    def _environment(self) -> Mapping[str, str]:
        # Byte code is dated by the second: that of a file that was left out would pass for that of the whole one.
        path = os.pathsep.join([str(self._folder), str(self._folder / "proto")])
        return {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


def _git(*arguments: str) -> list[str]:
    listed = subprocess.run(["git", *arguments, "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name]


def tried(copy: Copy, change: Change) -> tuple[list[str], int]:
    """Complaints about a change that applies, and the number of generated files that it changes."""
    copy.plant(change)
    regenerated = copy.generate()
    wrong = []
    if failed := copy.failures(change):
        wrong.append(f"{change.title}: does not work\n{failed}")
    for path in () if wrong else change.files:
        if noticed := copy.without(change, path, regenerated):
            print(f"  {change.name}, without {path}: {_said(noticed)}", flush=True)
        else:
            wrong.append(f"{change.title}: nobody notices that {path} is left out; a test or an error() has to")
    copy.undo(change, regenerated)
    return wrong, len({*regenerated} - {*change.files})


def _said(failed: str) -> str:
    """The error of a failing test."""
    errors = [line.removeprefix("E ").strip() for line in failed.splitlines() if line.startswith("E ")]
    return errors[0] if errors else failed.splitlines()[-1]


def row(change: Change, generated: int | None) -> str:
    """Line of the table."""
    counts = Counter(map(area, change.files))
    goal = f"at most {change.most_files}" + (f", none in {change.not_in}" if change.not_in else "")
    shown = "" if generated is None else f" {generated} |"
    return f"| {change.title} | {counts['code']} | {goal} | {counts['docs']} | {counts['tests']} |{shown}"


def main() -> int:
    """Plant, count and check; returns an exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", action="store_true")
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args()
    chosen = [change for change in CHANGES if not options.names or change.name in options.names]
    wrong, rows = [], []
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Copy(Path(folder))
        for change in chosen:
            wrong += [change.excess()] if change.excess() else []
            generated = None
            try:
                if options.count:
                    copy.plant(change)
                    copy.undo(change, ())
                else:
                    found, generated = tried(copy, change)
                    wrong += found
            except DoesNotApply as error:
                wrong.append(str(error))
                break
            rows.append(row(change, generated))
    last = "" if options.count else " generated |"
    print(f"| change | code files | goal | docs | tests |{last}\n|---|---|---|---|---|{'---|' if last else ''}")
    print("\n".join(rows))
    for each in wrong:
        print(f"planted-changes: {each}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
