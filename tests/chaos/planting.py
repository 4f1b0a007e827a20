"""Planted defects under the chaos run: each is made in a copy of the tree, and bouts are lived until one finds it.

usage: python -m tests.chaos.planting [--minutes M] [--seed N] [--only WORDS] [--out FILE]

M is the longest time for one defect. Exits with 1 when fewer than 18 in 20 are found, or an edit finds no place.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.chaos.defects import DEFECTS, Defect

ROOT = Path(__file__).resolve().parents[2]
WANTED = 0.9
OF_THE_MACHINE = ("ServiceFailed", "TimeoutError", "it stood still")
"""Problems that a machine which is too busy makes too."""


def copied(folder: Path) -> Path:
    """Copy the tree's tracked and new files."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    for name in listed:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


def sought(defect: Defect, tree: Path, seed: int, minutes: float) -> dict[str, Any]:
    """Live bouts with the defect until one finds it, or the time is over."""
    began, lived = time.monotonic(), dict.fromkeys(("bouts", "kills", "other_faults"), 0)
    problems: list[str] = []
    left = minutes
    while left > 0 and not problems:
        made = _struck(tree, seed, left, defect.stores)
        for name in lived:
            lived[name] += made["counts"][name]
        found = [problem for each in made["bouts"] for problem in each["problems"]]
        # Others follow.
        problems = [problem for problem in found if not problem.startswith(OF_THE_MACHINE)]
        left = minutes - (time.monotonic() - began) / 60
        seed += 1
    return {
        "defect": defect.name,
        "found": bool(problems),
        # A client that ended is an assertion of the fleet.
        "by": problems[0].splitlines()[0].removeprefix("AssertionError: ")[:160] if problems else "",
        **lived,
        "seconds": round(time.monotonic() - began),
    }


def _struck(tree: Path, seed: int, minutes: float, stores: str) -> dict[str, Any]:
    """Report of bouts until one has a problem, or the time is over."""
    report = tree / "report.json"
    report.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "tests.chaos", "--minutes", str(minutes), "--seed", str(seed), "--stores", stores,
        "--until-violation", "--real-every", "0", "--out", str(report),
    ]  # fmt: skip
    path = os.pathsep.join([str(tree), str(tree / "proto")])
    subprocess.run(command, cwd=tree, env={**os.environ, "PYTHONPATH": path}, capture_output=True, check=False)
    made: dict[str, Any] = json.loads(report.read_text())
    return made


def main() -> int:
    """Plant each, and say what became of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.planting")
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="defects whose names have these words")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="chaos-planted-") as folder:
        tree = copied(Path(folder))
        for defect in DEFECTS:
            if options.only not in defect.name:
                continue
            file = tree / defect.edit.path
            sound = file.read_text()
            defect.edit.apply(tree)
            results.append(sought(defect, tree, options.seed, options.minutes))
            file.write_text(sound)
            print(json.dumps(results[-1]), flush=True)
            if options.out is not None:
                options.out.write_text(json.dumps({"seed": options.seed, "defects": results}, indent=1) + "\n")
    found = sum(result["found"] for result in results)
    print(f"planting: {found} of {len(results)} found")
    return 0 if found >= WANTED * len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
